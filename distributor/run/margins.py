"""The time limits and intervals of a run that users cannot set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Margins:
    """The time limits and intervals of a run, in seconds, that users cannot set.

    Attributes:
        stop: time after the grace period until the scheduler ends a run that has not stopped.
        kill: time for nodes to kill their ranks and report after ``run.kill()``, before the scheduler ends the nodes.
        lost: time for a job to end by itself, once one of its nodes is lost and all others have ended.
        unreached: time that tasks run before a warning is logged that no node has reached the driver; also time after
            ``run.stop()`` until a warning is logged that not all nodes reach the driver.
        look: time between checks whether tasks run, and between checks whether the cluster will soon end a node.
        stall_answer: time for ranks to report their stacks before a stalled run is stopped.
        last_words: time for ranks to report their stacks before an interrupted run is stopped.
        transfer: extra time for the transfer of the ranks' stacks, beyond the time that ranks get to report them.
        patience: time before the scheduler is first asked, for the status, what a run waits for.
        ask: time until the scheduler is asked this again.
        again: time until the scheduler is asked again to end a job that it could not end at once.
        repeat: time after which the order to stop together at a step is repeated, because the order may get lost.
        widen: time between two checks for free slots for more ranks.
        blame: time for the failure to be reported that explains a broken connection between ranks.
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
    widen: float = 60.0
    blame: float = 1.0
