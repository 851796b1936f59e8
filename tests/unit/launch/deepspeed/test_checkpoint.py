"""The file that names the latest checkpoint of a DeepSpeed engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import stores

from distributor.errors import ConfigurationError
from distributor.launch.deepspeed.checkpoint import _latest


def test_why_there_is_no_latest_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    with pytest.raises(ConfigurationError, match="there is no checkpoint in .*: the file 'latest' is missing"):
        _latest(tmp_path, False)
    path.touch()
    with pytest.raises(ConfigurationError, match="latest' is empty: pass the tag of the checkpoint to load"):
        _latest(tmp_path, False)
    stores.unreadable(path)
    with pytest.raises(OSError, match="Input/output error"):
        _latest(tmp_path, False)
    path.unlink()
    path.write_text("step-3\n")
    assert _latest(tmp_path, False) == "step-3"
