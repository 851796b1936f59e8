"""The results that nodes send the driver over the channel once all their ranks have succeeded.

On Spark, they also arrive as results of the job. If it fails after training has ended, for example because Spark loses
an executor, the driver uses those of the channel.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Collection
from typing import Protocol

from distributor.channel.result_receiver import ResultReceiver
from distributor.values.messages import Delete, Finished, Upload
from distributor.values.outcome import Collected

_LOOK = 0.05  # seconds between checks of what has arrived


class FileSink(Protocol):
    """Keeps the ranks' new files in ``output_dir``; called in the channel's thread."""

    @property
    def progress(self) -> int:
        """Grows as files arrive."""

    async def receive(
        self, upload: Upload, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Receive a file over the connection that announced it, and answer."""

    async def give(self, writer: asyncio.StreamWriter) -> None:
        """Send a node the files in the driver's ``output_dir``."""

    async def delete(self, request: Delete, node: int, writer: asyncio.StreamWriter) -> None:
        """Record that ranks have removed a file, and answer."""


class Transfers:
    """The results that have come over the channel, for use in its thread only."""

    def __init__(self, receiver: ResultReceiver, file_sink: FileSink | None = None) -> None:
        self.receiver = receiver
        self.file_sink = file_sink
        self._finished: dict[str, Finished] = {}

    def __bool__(self) -> bool:
        return bool(self._finished)

    def __contains__(self, node: str) -> bool:
        return node in self._finished

    def note(self, node: str, finished: Finished) -> None:
        self._finished[node] = finished

    async def clear(self) -> None:
        self._finished.clear()
        self.receiver.clear()

    async def wait(
        self, nodes: Callable[[], Collection[str] | None], hopeless: Callable[[], bool], patience: float
    ) -> Collected | None:
        """Return the results of all nodes.

        ``None`` if ``hopeless`` says that missing ones cannot arrive, or if nothing arrives for ``patience`` seconds.
        """
        loop = asyncio.get_running_loop()
        seen, since = (-1, -1, -1), loop.time()
        while not self._complete(nodes()):
            kept = 0 if self.file_sink is None else self.file_sink.progress
            now = len(self._finished), self.receiver.received, kept
            if now != seen:
                seen, since = now, loop.time()
            if hopeless() or loop.time() - since > patience:
                return None
            await asyncio.sleep(_LOOK)
        return self._collected()

    def _complete(self, nodes: Collection[str] | None) -> bool:
        if nodes is None or not set(nodes) <= set(self._finished):
            return False
        return all(self.receiver.has(rank) for finished in self._finished.values() for rank in finished.following)

    def _collected(self) -> Collected:
        values: dict[int, list[bytes | memoryview]] = {}
        for finished in self._finished.values():
            for rank, text in finished.values:
                values[rank] = [base64.b64decode(text)]
            for rank in finished.following:
                if (arrived := self.receiver.get(rank)) is not None:
                    values[rank] = [arrived.data]
        reports = sorted((each.report for each in self._finished.values()), key=lambda report: report.node_rank)
        return Collected(tuple(reports), values)
