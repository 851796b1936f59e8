"""The interface that a run needs from a scheduler."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from distributor.channel.server import ChannelServer
from distributor.values.job import Job, Step
from distributor.values.outcome import Collected


class Scheduler(Protocol):
    """A place where a job can run. ``run`` blocks the thread that ``thread`` made; any thread may call ``cancel``."""

    @property
    def on_driver(self) -> bool:
        """Whether ranks run on the driver's machine, with its files."""

    def thread(self, target: Any) -> threading.Thread:
        """Make a thread that may call ``run``."""

    def run(self, job: Job, server: ChannelServer) -> Collected:
        """Run a job to its end. Failures of ranks are returned as data, not raised."""

    def cancel(self) -> None:
        """End the run by force, also on nodes that did not hear the order to stop.

        Local ranks get no grace period. On Spark, an agent whose task has ended still gives its ranks theirs.
        """

    def waiting_for(self) -> Step | None:
        """Return what the run's nodes wait for before they can start; ``None`` if tasks run or it is not known."""
