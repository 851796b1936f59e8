"""Carries out one attempt: passes events to the attempt's state, and performs the actions that the state returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from distributor.display.display import Display
from distributor.run import events, state
from distributor.run.alarm import Alarm
from distributor.run.events import Deadline, Event
from distributor.run.state import AttemptState
from distributor.run.submission import Submission
from distributor.text import notices

_log = notices.logger


class Line(Protocol):
    """The interface through which an attempt sends requests to its run. No method blocks."""

    def ask_stacks(self, then: Callable[[Event], object]) -> None:
        """Ask all ranks for their stacks. Once all answer or time is up, pass the stacks to ``then`` in an event.

        Do nothing if no ranks are running, or if an earlier request still waits for answers.
        """

    def rest(self, port: int | None) -> None:
        """Decide whether the nodes begin another attempt or end, now that all of them have stopped their ranks.

        Args:
            port: the port on node 0 at which the ranks of another attempt meet; ``None`` if these nodes cannot begin
                another attempt.
        """


class Attempt:
    """One attempt of a run. Any thread may report an event to it.

    Questions to the scheduler may block. So the attempt asks them in the thread of its timer, the :class:`Alarm`.

    Args:
        about: the attempt's state.
        submission: the submitted job in which the attempt runs.
        line: the attempt's run, which performs the attempt's requests, such as one for the stacks of all ranks.
        alarm: the timer. In its own thread, it calls functions at deadlines, and makes calls that may block.
        display: shows where the ranks run.
    """

    def __init__(self, about: AttemptState, submission: Submission, line: Line, alarm: Alarm, display: Display) -> None:
        self.state = about
        self._submission = submission
        self._line = line
        self._alarm = alarm
        self._display = display
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin the attempt: set its first deadlines, such as the one for its start."""
        with self._lock:
            actions = self.state.begin()
        self._perform(actions)

    def on(self, event: Event) -> bool:
        """Pass an event to the attempt's state, and perform the actions that the state returns.

        Return ``True``, or ``False`` if the attempt had already ended.
        """
        with self._lock:
            live = not isinstance(self.state.phase, state.Ended)
            actions = self.state.on(event, time.monotonic())
        self._perform(actions)
        return live

    def _ask_scheduler(self, deadline: Deadline) -> None:
        self.on(self._submission.ask_scheduler(deadline))

    def _perform(self, actions: list[events.Action]) -> None:
        for action in actions:
            match action:
                case events.StopRanks():
                    self._submission.stop_ranks(action.reason, grace=action.grace, hasty=action.hasty)
                case events.TellNodes():
                    self._submission.order(action.order)
                case events.EndJob():
                    self._submission.end()
                case events.Arm(deadline=deadline):
                    self._alarm.after(action.after, partial(self.on, events.Due(deadline)), key=(self, deadline))
                case events.AskScheduler(deadline=deadline):
                    self._alarm.after(0.0, partial(self._ask_scheduler, deadline), key=(self, deadline, "ask"))
                case events.AskRoom():
                    self._alarm.after(0.0, lambda: self.on(self._submission.look_for_room()), key=(self, action))
                case events.AskLeaving():
                    self._alarm.after(0.0, lambda: self.on(self._submission.look_for_leaving()), key=(self, action))
                case events.AskStacks():
                    self._line.ask_stacks(self.on)
                case events.Rest():
                    self._line.rest(action.port)
                case events.Announce():
                    self._display.announce(action.text)
                case events.Warn():
                    _log.warning("%s", action.text)
