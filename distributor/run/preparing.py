"""What a run does until its ranks are up, such as waiting for slots, and for how long it has done so."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from distributor.run.margins import Margins
from distributor.run.state import AttemptState, Starting, Waiting
from distributor.run.submission import Submission
from distributor.values.job import StatusDetail


class Preparing:
    """Finds what a run does until its ranks are up. Any thread may call the methods."""

    def __init__(self, margins: Margins) -> None:
        self._margins = margins
        self._lock = threading.Lock()
        self._step = ("", 0.0)  # what the run does to start, and since when
        self._waits: tuple[float, StatusDetail | None] = (
            0.0,
            None,
        )  # when the scheduler was last asked, and its answer

    def step(self, state: AttemptState, submission: Submission) -> tuple[str, float]:
        """Return what the run does to start, and for how many seconds; ``("", 0.0)`` once it is up, or if unknown."""
        step = self._detail(state, submission)
        if step is None:
            return "", 0.0
        with self._lock:
            if self._step[0] != step.what:
                self._step = step.what, time.monotonic()
            return str(step), time.monotonic() - self._step[1]

    def wants_slots(self, state: AttemptState, submission: Submission) -> bool:
        """Return whether the run waits for slots that the cluster has, or may be about to take some."""
        step = self._detail(state, submission)
        return not self.holds_slots(state, submission) and (step is None or not step.yields)

    def holds_slots(self, state: AttemptState, submission: Submission) -> bool:
        """Return whether the run has its slots, as far as is known; also once it has ended."""
        if not isinstance(state.phase, Waiting) or state.nodes.step is not None:
            return True
        step = self._detail(state, submission)
        return step is not None and step.holds

    def _detail(self, state: AttemptState, submission: Submission) -> StatusDetail | None:
        if not isinstance(state.phase, (Waiting, Starting)):
            return None
        if state.nodes.step is None and isinstance(state.phase, Waiting):
            return self._before_nodes(state, submission, time.monotonic() - state.phase.since)
        return state.nodes.step

    def _before_nodes(self, state: AttemptState, submission: Submission, waited: float) -> StatusDetail | None:
        """Return what a run does while none of its nodes has reported."""
        job = submission.job
        if job.identity is not None and job.fence is None:
            return StatusDetail(f"waiting until no other run uses the name {job.identity.name!r}", yields=True)
        if submission.feeding:
            return StatusDetail("writing the data for the ranks", yields=True)
        if state.unreached:
            return StatusDetail("Spark runs the tasks, but no node has reached the driver", holds=True)
        server = submission.server
        if server is not None and server.begun:
            return StatusDetail("starting a process on each node", holds=True)
        if waited < self._margins.patience:  # the scheduler may not have begun to start the nodes yet
            return None
        waits = self._waiting_for(submission)
        if waits is not None or server is None:
            return waits
        return StatusDetail(
            "waiting for Spark's tasks to reach the driver",
            f": {server.told} of {submission.job.num_tasks} have",
            holds=submission.scheduler.reports_slots,  # others do not say that they wait for slots
        )

    def _waiting_for(self, submission: Submission) -> StatusDetail | None:
        """Return what the job waits for. The scheduler's answer is cached: it takes several calls to Spark."""
        asked, told = self._waits
        if time.monotonic() - asked > self._margins.ask:
            with suppress(Exception):  # calls fail while Spark's context stops
                told = submission.scheduler.waiting_for()
            self._waits = time.monotonic(), told
        return told
