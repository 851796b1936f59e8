"""What an attempt on one node does when something fails around its ranks."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from unittest.mock import Mock

import pytest

from distributor.node.node_attempt import NodeAttempt
from distributor.values import layout


class WithoutFiles(NodeAttempt):
    """An attempt whose agent may open no further file."""

    def __init__(self, folder: Path) -> None:
        self._assignment = Mock()
        self._assignment.order.folder = folder
        self._assignment.order.plan.node.local_world_size = 1
        self._link, self._logs, self._ranks = Mock(is_open=True), Mock(), Mock()
        self._logs.follow = self._ranks.node_stop.follow = asyncio.Event().wait

    async def _run_processes(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)  # the tasks that follow output have begun
        raise OSError(24, "Too many open files")


def test_an_attempt_that_cannot_start_leaves_no_exception_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(WithoutFiles(tmp_path).run())
    gc.collect()
    assert layout.vote_file(tmp_path).exists()
    assert [record.getMessage() for record in caplog.records] == []
