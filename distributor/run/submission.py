"""One job as it was submitted to its scheduler: orders to its nodes, questions about it, and its end."""

from __future__ import annotations

from distributor.channel.server import ChannelServer
from distributor.run import state
from distributor.run.alarm import Alarm
from distributor.run.state import Deadline, Event, Margins
from distributor.schedulers.base import Scheduler
from distributor.text import notices
from distributor.values.job import Job, Step
from distributor.values.messages import Message
from distributor.values.outcome import Collected

_log = notices.logger


class Submission:
    """A job that is submitted once. A run that has lost its nodes makes another submission.

    Args:
        job: the job.
        scheduler: runs the job, and no other.
        alarm: makes the calls that may block.
        margins: the run's time limits and intervals that users cannot set.
    """

    def __init__(self, job: Job, scheduler: Scheduler, alarm: Alarm, margins: Margins) -> None:
        self.job = job
        self.scheduler = scheduler
        #: The channel to the job's nodes; ``None`` until the job runs.
        self.server: ChannelServer | None = None
        self._alarm = alarm
        self._margins = margins

    def run(self, server: ChannelServer) -> Collected:
        """Run the job to its end. Failures of ranks are returned as data; for what it raises, see the scheduler."""
        return self.scheduler.run(self.job, server)

    def stop_ranks(self, reason: str, *, grace: bool, hasty: bool) -> None:
        """Order all nodes to stop their ranks."""
        if self.server is not None:
            self.server.stop(reason, grace=grace, hasty=hasty)

    def order(self, order: Message) -> None:
        """Send an order to all nodes that are connected now."""
        if self.server is not None:
            self.server.order(order)

    def end(self) -> None:
        """End the job through the scheduler, as soon as the scheduler can."""
        self._alarm.after(0.0, self._end, key=(self, "end"))

    def _end(self) -> None:
        if self.scheduler.cancel():
            self._alarm.after(self._margins.again, self._end)

    def ask_scheduler(self, deadline: Deadline) -> Event:
        """Ask the scheduler what it waits for, and return its answer. May block while it calls Spark."""
        server = self.server
        assert server is not None
        reach, step = deadline is Deadline.REACH, None
        if not (reach and server.reached):
            try:
                step = self.scheduler.waiting_for()
            except Exception as error:  # Spark's context may be stopping
                _log.debug("run %s: cannot tell what it waits for: %s", self.job.run_id, error)
                step = Step("") if reach else None
        return state.Asked(deadline, step, server.address, server.reached)
