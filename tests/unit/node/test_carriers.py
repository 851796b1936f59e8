"""Copies of new files on the driver's machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from distributor.machine.storage import Folder
from distributor.node.carriers import ChangedError, Direct
from distributor.values.files import Entry


def test_a_file_that_changes_meanwhile_is_not_kept(tmp_path: Path) -> None:
    source, kept = tmp_path / "a", tmp_path / "kept"
    source.write_bytes(b"content")
    entry = Entry("a", 7, 0o640, 10**18, "digest")
    carrier = Direct(Folder(kept), 100)
    with pytest.raises(ChangedError, match=f"{source} changed while it was being copied"):
        carrier.carry(entry, str(source), lambda: False)
    assert not any(path.is_file() for path in kept.rglob("*"))
    carrier.carry(entry, str(source), lambda: True)
    assert (kept / "a").read_bytes() == b"content"


def test_what_is_no_output_takes_no_room(tmp_path: Path) -> None:
    """A link that leads nowhere neither."""
    source, kept = tmp_path / "a", tmp_path / "kept"
    source.write_bytes(b"content")
    (kept / ".venv").mkdir(parents=True)
    (kept / ".venv" / "large").write_bytes(bytes(1000))
    (kept / "loop").symlink_to("loop")
    Direct(Folder(kept), 100).carry(Entry("a", 7, 0o640, 10**18, "digest"), str(source), lambda: True)
    assert (kept / "a").read_bytes() == b"content"


class Full(Folder):
    def put(self, source: str, name: str) -> None:
        self._made(name).write_bytes(b"con")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nothing_is_left_of_a_file_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        Direct(Full(tmp_path), 100).carry(Entry("deep/a", 7, 0o640, 10**18, "digest"), "a", lambda: True)
    assert not any(tmp_path.iterdir())


def test_the_limit_is_for_what_is_there_now(tmp_path: Path) -> None:
    carrier = Direct(Folder(tmp_path / "kept"), 10)

    def carry(path: str, size: int) -> None:
        (tmp_path / "source").write_bytes(bytes(size))
        carrier.carry(Entry(path, size, 0o640, 10**18, "digest"), str(tmp_path / "source"), lambda: True)

    carry("a", 8)
    carry("a", 6)
    carry("b", 4)
    with pytest.raises(OSError, match="would exceed output_limit"):
        carry("b", 5)
    carrier.delete("a")
    carry("b", 10)
