"""What a run needs of a scheduler."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from distributor.channel.server import ChannelServer
from distributor.values.job import Job, Step
from distributor.values.outcome import Collected


class Scheduler(Protocol):
    """Where a job runs. ``run`` blocks in the thread that ``thread`` made; ``cancel`` may come from any."""

    @property
    def on_driver(self) -> bool:
        """Whether ranks run on the driver's machine, with its files."""

    def thread(self, target: Any) -> threading.Thread:
        """A thread that may call ``run``."""

    def run(self, job: Job, server: ChannelServer) -> Collected:
        """Runs a job to its end; failures of ranks are data, not exceptions."""

    def cancel(self) -> None:
        """Ends the run the hard way: without a grace for ranks, where they did not hear of it."""

    def waiting_for(self) -> Step | None:
        """What the run's nodes wait for before they can start; ``None`` if its tasks are running."""
