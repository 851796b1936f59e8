"""The time limits and intervals of a run that users cannot set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Margins:
    """The time limits and intervals of a run, in seconds, that users cannot set.

    Attributes:
        stop: time from the end of the grace period until a run that has not stopped is ended through the scheduler.
        kill: time for nodes to kill their ranks and report, before the scheduler ends nodes and ranks together.
        lost: time for a job that has lost a node to end by itself, after all other nodes have ended too.
        unreached: time that tasks run without any of them reaching the driver, before a warning.
        look: time between checks of whether the scheduler runs the tasks.
        stall_answer: time for ranks to report their stacks before a stalled run is stopped.
        last_words: time for ranks to report their stacks before an interrupted run is stopped.
        transfer: time for the transfer of the ranks' answers, added to the time that they get to answer.
        patience: time until the scheduler is asked what a run waits for.
        ask: time between two such questions.
        again: time until the scheduler is asked again to end a job that it could not end at that moment.
        repeat: time between two orders of one kind to ranks that stop together, since an order may get lost.
        view: time to wait for a display that hangs.
        widen: time between two looks for slots for more ranks.
    """

    stop: float = 5.0
    kill: float = 2.0
    lost: float = 2.0
    unreached: float = 60.0
    look: float = 5.0
    stall_answer: float = 5.0
    last_words: float = 0.25
    transfer: float = 2.0
    patience: float = 2.0
    ask: float = 0.5
    again: float = 0.2
    repeat: float = 0.5
    view: float = 2.0
    widen: float = 60.0
