"""A file that stays open although other code closes its descriptor."""

from __future__ import annotations

import os
from pathlib import Path

from distributor.machine.own_file import OwnFile


def test_a_descriptor_that_others_have_closed_or_reused_is_opened_again(tmp_path: Path) -> None:
    file = OwnFile(tmp_path / "reports", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file.descriptor(), b"one ")
    first = file.descriptor()
    assert file.descriptor() == first
    os.close(first)
    os.write(file.descriptor(), b"two ")
    os.close(file.descriptor())
    (tmp_path / "other").touch()
    other = os.open(tmp_path / "other", os.O_WRONLY)  # takes the number that was just closed
    os.write(file.descriptor(), b"three")
    os.close(other)
    file.close()
    file.close()
    assert (tmp_path / "reports").read_text() == "one two three"
    assert (tmp_path / "other").read_text() == ""
