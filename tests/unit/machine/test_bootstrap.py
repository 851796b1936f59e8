"""What a process shows of itself."""

from __future__ import annotations

import pytest

from distributor.machine import bootstrap


def test_what_is_shown_cannot_become_longer() -> None:
    told = "the kernel cannot show b'NAME=longer' in place of b'NAME=old' for this process: the new text is longer"
    with pytest.raises(ValueError, match=told):
        bootstrap.overwrite_environ("NAME=old", "NAME=longer")
