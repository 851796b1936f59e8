"""Copies of new files on the driver's machine."""

from __future__ import annotations

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
