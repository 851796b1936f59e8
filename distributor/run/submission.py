"""Submits one job to a scheduler, sends orders to its nodes, asks the scheduler about it, and ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from distributor.channel.server import ChannelServer
from distributor.errors import ConfigurationError
from distributor.run import events
from distributor.run.alarm import Alarm
from distributor.run.events import Deadline, Event
from distributor.run.margins import Margins
from distributor.run.width import SETTLE, widths
from distributor.schedulers.base import Scheduler
from distributor.text import notices
from distributor.values.job import Job, StatusDetail
from distributor.values.messages import Message
from distributor.values.outcome import Collected

_log = notices.logger

T = TypeVar("T")

_LOOK = 0.5  # seconds between checks for free slots

#: Returns the job with another number of ranks; ConfigurationError if the job cannot have it.
Resize = Callable[[Job, int], Job]


class Submission:
    """The submission of one job to a scheduler. A run's next job is another submission."""

    def __init__(
        self,
        job: Job,
        scheduler: Scheduler,
        alarm: Alarm,
        margins: Margins,
        resize: Resize | None = None,
        contested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.job = job
        self.scheduler = scheduler
        self.server: ChannelServer | None = None  # None until the driver has opened the channel
        self.feeding = False  # the run's data is being written
        self._alarm = alarm  # its thread ends the job, since Scheduler.cancel may block
        self._margins = margins
        self._resize = resize  # None: the number of ranks is fixed
        self._contested = contested  # whether another run waits for slots
        self._has_ended = False
        self._narrower: int | None = None  # ranks of the previous job, if it stopped so that this one could have more

    def following(self, job: Job, *, wider: bool = False) -> Submission:
        """Return the submission of the run's next job.

        ``wider``: this job has stopped so that the next one can have more ranks.
        """
        made = Submission(job, self.scheduler.again(job), self._alarm, self._margins, self._resize, self._contested)
        made._narrower = self.job.resources.num_processes if wider else None
        return made

    def fit(self, wanted: Callable[[], bool]) -> None:
        """Give the job as many ranks as free task slots allow; if they are too few, wait for more while ``wanted()``.

        If the number of ranks is fixed, do nothing. ConfigurationError: the launch path refuses every possible number.
        """
        if self._resize is None or self.job.widths is None:
            return
        self._change(self._resize(self.job, self.job.widths.least))
        most, since = self.job.widths.least - 1, time.monotonic()
        while wanted():
            room, now = self.scheduler.room(self.job), time.monotonic()
            if room is not None and room > most:
                most, since = room, now
            settles = self.scheduler.slots_may_come
            if (found := self._widest(room, now - since if settles else SETTLE)) is not None:
                self._change(found)
                return
            time.sleep(_LOOK)

    def _widest(self, room: int | None, waited: float = SETTLE) -> Job | None:
        """Return the job with as many ranks as fit into ``room``; ``None`` if it should wait for more slots."""
        assert self._resize is not None and self.job.widths is not None
        refused: ConfigurationError | None = None
        for width in widths(room, self.job.widths, self.job.ranks_per_task, waited):
            try:
                return self._resize(self.job, width)
            except ConfigurationError as error:
                refused = error
        if refused is not None:
            raise refused
        return None

    def _change(self, job: Job) -> None:
        if job is not self.job:
            self.job, self.scheduler = job, self.scheduler.again(job)

    def look_for_room(self) -> Event:
        """Return how many more ranks a new job could have. May block in calls to Spark."""
        return events.Room(self._calmly(self._further, "look for free slots", 0))

    def _further(self) -> int:
        if self._contested():  # the run would lose its own slots to the one that waits
            return 0
        now = self.job.resources.num_processes
        if self._narrower is not None and now <= self._narrower:
            return 0
        room = self.scheduler.room(self.job)
        found = self._widest(now + room) if room else None
        return 0 if found is None else found.resources.num_processes - now

    def look_for_leaving(self) -> Event:
        """Return which node the cluster will soon end, if any. May block in calls to Spark."""
        return events.Leaving(self._calmly(self.scheduler.leaving, "look for nodes that are about to end", None))

    def _calmly(self, ask: Callable[[], T], what: str, otherwise: T) -> T:
        """Return what ``ask`` returns, or ``otherwise`` if it raises, as while Spark's context stops."""
        try:
            return ask()
        except Exception as error:
            _log.debug("run %s: cannot %s: %s", self.job.label, what, error)
            return otherwise

    def run(self, server: ChannelServer) -> Collected:
        try:
            return self.scheduler.run(self.job, server)
        finally:
            self._has_ended = True

    def stop_ranks(self, reason: str, *, grace: bool, hasty: bool) -> None:
        if self.server is not None:
            self.server.stop(reason, grace=grace, hasty=hasty)

    def order(self, order: Message) -> None:
        if self.server is not None:
            self.server.order(order)

    def end(self) -> None:
        """End the job as soon as the scheduler can end it."""
        self._alarm.after(0.0, self._end, key=(self, "end"))

    def _end(self) -> None:
        if self._has_ended:
            return
        wait = self._margins.insist
        try:
            if self.scheduler.cancel():
                wait = self._margins.again
        finally:  # also if the call has failed
            self._alarm.after(wait, self._end, key=(self, "end again"))

    def ask_scheduler(self, deadline: Deadline) -> Event:
        """Return what the scheduler says that the job waits for. May block in calls to Spark."""
        server = self.server
        reach, step = deadline is Deadline.REACH, None
        reached = server is not None and server.reached
        if not (reach and reached):
            step = self._calmly(
                self.scheduler.waiting_for, "tell what it waits for", StatusDetail("") if reach else None
            )
        address = None if server is None else server.address
        return events.Asked(deadline, step, address, reached or (server is not None and server.reached))
