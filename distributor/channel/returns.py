"""Keep, on the driver, the results that nodes send over the channel once all their ranks have succeeded.

On Spark, each node's results reach the driver in two ways: over the channel (the node's own connection to the driver),
and as results of the Spark job. If the Spark job fails after training has ended, for example because Spark loses an
executor, the driver uses the results from the channel.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Collection
from typing import Protocol

from distributor.channel.intake import Intake
from distributor.values.messages import Deposit, Finished, Withdraw
from distributor.values.outcome import Collected

#: Number of seconds between checks of what has arrived.
_LOOK = 0.05


class Depository(Protocol):
    """Keeps the ranks' new files in ``output_dir``. The methods of this class run in the channel's thread."""

    @property
    def progress(self) -> int:
        """A number that grows as files arrive."""

    async def receive(
        self, deposit: Deposit, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Receive a file over the connection on which the node has announced the file, and answer the node."""

    async def give(self, writer: asyncio.StreamWriter) -> None:
        """Send a node the files that are in ``output_dir`` on the driver."""

    async def withdraw(self, told: Withdraw, node: int, writer: asyncio.StreamWriter) -> None:
        """Record that a node's ranks have removed a file, and answer the node."""


class Returns:
    """The results of a run's nodes that have come over the channel. Use this object in the channel's thread only.

    Args:
        intake: receives, over separate connections, return values that are too large for a node's final message.
        depository: keeps the ranks' new files in ``output_dir``; ``None`` if the run has no ``output_dir``.
    """

    def __init__(self, intake: Intake, depository: Depository | None = None) -> None:
        self.intake = intake
        self.depository = depository
        self._finished: dict[str, Finished] = {}

    def __bool__(self) -> bool:
        return bool(self._finished)

    def note(self, node: str, finished: Finished) -> None:
        """Record the results that a node has sent."""
        self._finished[node] = finished

    async def clear(self) -> None:
        """Forget the results of all nodes."""
        self._finished.clear()
        self.intake.clear()

    async def wait(
        self, nodes: Callable[[], Collection[str] | None], hopeless: Callable[[], bool], patience: float
    ) -> Collected | None:
        """Wait until the results of all nodes have arrived, and return them; ``None`` if some results do not arrive.

        Args:
            nodes: returns the names of the run's nodes; ``None`` while they are not known.
            hopeless: returns whether the missing results can no longer arrive.
            patience: number of seconds to wait while nothing arrives.
        """
        loop = asyncio.get_running_loop()
        seen, since = (-1, -1, -1), loop.time()
        while not self._complete(nodes()):
            kept = 0 if self.depository is None else self.depository.progress
            now = len(self._finished), self.intake.received, kept
            if now != seen:
                seen, since = now, loop.time()
            if hopeless() or loop.time() - since > patience:
                return None
            await asyncio.sleep(_LOOK)
        return self._collected()

    def _complete(self, nodes: Collection[str] | None) -> bool:
        if nodes is None or not set(nodes) <= set(self._finished):
            return False
        return all(self.intake.has(rank) for finished in self._finished.values() for rank in finished.following)

    def _collected(self) -> Collected:
        values: dict[int, list[bytes | memoryview]] = {}
        for finished in self._finished.values():
            for rank, text in finished.values:
                values[rank] = [base64.b64decode(text)]
            for rank in finished.following:
                if (arrived := self.intake.get(rank)) is not None:
                    values[rank] = [arrived.data]
        reports = sorted((each.report for each in self._finished.values()), key=lambda report: report.node_rank)
        return Collected(tuple(reports), values)
