"""One attempt: passes events to its state, and performs the actions that the state returns."""

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


class Line(Protocol):
    """What an attempt requests of its run. No method blocks."""

    def ask_stacks(self, then: Callable[[Event], object]) -> None:
        """Ask running ranks for their stacks, unless a request is pending. ``then`` gets the answers in an event."""

    def rest(self, port: int | None) -> None:
        """Decide whether the nodes, none of which has ranks left, begin another attempt or end.

        Without ``port``, where ranks of another attempt would meet on node 0, these nodes cannot begin one.
        """

    def quiet(self) -> float:
        """Return for how many seconds no output of ranks has arrived."""


class Attempt:
    """One attempt of a run. Any thread may report an event to it."""

    def __init__(self, about: AttemptState, submission: Submission, line: Line, alarm: Alarm, display: Display) -> None:
        self.state = about
        self._submission = submission
        self._line = line
        self._alarm = alarm  # its thread asks the scheduler, which may block
        self._display = display
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            actions = self.state.begin()
        self._perform(actions)

    def on(self, event: Event) -> bool:
        """Pass an event to the state, and perform its actions. Return ``False`` if the attempt had already ended."""
        with self._lock:
            live = not isinstance(self.state.phase, state.Ended)
            actions = self.state.on(event, time.monotonic())
        self._perform(actions)
        return live

    def _due(self, deadline: Deadline) -> None:
        self.on(events.Due(deadline, self._line.quiet()))

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
                    self._alarm.after(action.after, partial(self._due, deadline), key=(self, deadline))
                case events.AskScheduler(deadline=deadline):
                    self._alarm.after(0.0, partial(self._ask_scheduler, deadline), key=(self, deadline, "ask"))
                case events.AskRoom():
                    self._alarm.after(0.0, lambda: self.on(self._submission.look_for_room()), key=(self, action))
                case events.AskLeaving():
                    self._alarm.after(0.0, lambda: self.on(self._submission.look_for_leaving()), key=(self, action))
                case events.AskStacks():
                    self._line.ask_stacks(self.on)
                case events.AtRest():
                    self._line.rest(action.port)
                case events.Announce():
                    self._display.announce(action.text)
                case events.Warn():
                    notices.soon(notices.warn, action.text)
