import subprocess

import pytest


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 1 MiB; root is needed to mount it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
