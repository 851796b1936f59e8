"""Files for the states of ranks in shared memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from distributor.machine import state_folders


def test_a_file_without_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, it would count against the limit, and its next user would get SIGBUS."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            state_folders.create_file(tmp_path / "3-0", 1000, 1000)
    assert not (tmp_path / "3-0").exists()
    state_folders.create_file(tmp_path / "3-0", 1000, 1000)
    assert (tmp_path / "3-0").stat().st_size == 1000
