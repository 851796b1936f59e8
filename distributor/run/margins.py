"""The time limits and intervals of a run that users cannot set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Margins:
    """All in seconds."""

    stop: float = 5.0  # from the end of the grace period until the scheduler ends the run
    output: float = 300.0  # beyond the grace period, for nodes to bring their ranks' last output, while it arrives
    kill: float = 2.0  # for nodes to kill their ranks after run.kill(), before the scheduler ends the nodes
    lost: float = 2.0  # for a job to end by itself, once a node is lost and all others have ended
    unreached: float = 60.0  # until a warning that no node has reached the driver or, after run.stop(), not all
    look: float = 5.0  # between checks whether tasks run, and whether the cluster will soon end a node
    stall_answer: float = 5.0  # for ranks to report their stacks before a stalled run is stopped
    last_words: float = 0.25  # for ranks to report their stacks before an interrupted run is stopped
    transfer: float = 2.0  # for the transfer of stacks, beyond the ranks' time to report them
    patience: float = 2.0  # until the scheduler is first asked what a run waits for
    ask: float = 0.5  # until it is asked again
    again: float = 0.2  # until it is asked again to end a job that it could not end at once
    insist: float = 2.0  # until it is asked again to end a job that it has tried to end
    repeat: float = 0.5  # until the order to stop at a step is repeated, since it may get lost
    widen: float = 60.0  # between checks for free slots for more ranks
    blame: float = 1.0  # for the failure to be reported that explains a broken connection between ranks
