"""This package as a zip."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import distributor
from distributor.shipping import package


def test_the_package_is_found_where_it_is():
    assert Path(package.package_root(), "distributor") == Path(distributor.__file__).parent


def test_the_zip_holds_all_modules_and_nothing_else():
    packed = set(zipfile.ZipFile(io.BytesIO(package.package_zip())).namelist())
    root = Path(package.package_root())
    assert {name for name in packed if name.startswith("distributor/")} == {
        str(path.relative_to(root)) for path in (root / "distributor").rglob("*.py")
    }
    assert "cloudpickle/cloudpickle.py" in packed
    assert all(name.startswith(("distributor/", "cloudpickle/")) and name.endswith(".py") for name in packed)


# What agents and ranks on executors use of the package; the launcher imports torch, which executors have.
SHIPPED = ["distributor", "distributor.node.agent", "distributor.rank.process", "distributor.errors", "cloudpickle"]


IMPORT = """
import importlib, sys
root, *names = sys.argv[1:]
sys.path.insert(0, root)
for name in names:
    assert importlib.import_module(name).__file__.startswith(root), name
"""


def test_the_zip_needs_the_standard_library_alone(tmp_path):
    root = tmp_path / "package.zip"
    root.write_bytes(package.package_zip())
    # -I -S: neither site-packages, nor the environment's import path, nor the current directory.
    subprocess.run([sys.executable, "-I", "-S", "-c", IMPORT, str(root), *SHIPPED], cwd=tmp_path, check=True)
