"""Receives, on the driver, the reports of a failed run's nodes, until it can cancel their Spark job.

The Spark job of a failed run must fail, too, and so it returns no reports. It must not fail before all have arrived, so
one task, the first to report, waits and keeps the job running. If some node's report comes through Spark only, this
task ends as well, the job succeeds, and all reports come through Spark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from distributor.values.messages import FailedReport


class FailedReports:
    """The reports of a failed run's nodes. Other threads may use ``rows`` and ``complete`` only."""

    def __init__(self) -> None:
        #: Called once, in the channel's thread, when all reports have arrived.
        self.on_complete: Callable[[], object] = lambda: None
        self._rows: dict[str, bytes] = {}
        self._nodes: int | None = None  # of the run
        self._waiting: asyncio.StreamWriter | None = None  # to the task that keeps the job running
        self._released = False

    @property
    def rows(self) -> list[bytes]:
        return list(self._rows.values())

    @property
    def complete(self) -> bool:
        return len(self._rows) == self._nodes

    def __contains__(self, node: str) -> bool:
        return node in self._rows

    async def receive(self, report: FailedReport, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive a report. Return once its task may end."""
        row = b""
        with suppress(OSError, asyncio.IncompleteReadError):
            row = await reader.readexactly(report.size)
        if not row:
            self.release()
            return
        if report.node not in self._rows and not self.complete:
            self._rows[report.node], self._nodes = row, report.nodes
            if self.complete:
                self.on_complete()
        if self._waiting is None and not self._released:
            self._waiting = writer
            with suppress(OSError):
                await reader.read(1)  # until the task is killed, has waited long enough, or is released
            self._waiting = None

    def release(self) -> None:
        """Let the waiting task end, and others not wait: some node's report comes through Spark only."""
        self._released = True
        if self._waiting is not None:
            self._waiting.close()
