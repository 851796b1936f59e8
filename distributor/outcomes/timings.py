"""Computes how long each phase of a run took, from timestamps of its job, nodes and ranks."""

from __future__ import annotations

from distributor.values.outcome import Collected

#: For each phase, the name of the timestamp at which it ends.
PHASES = {
    "schedule": "stage",
    "worker": "task",
    "exchange": "facts",
    "agent": "agent",
    "import": "ready",
    "fork": "started",
    "call": "called",
    "function": "returned",
    "exit": "exited",
}

#: What each phase means, for users.
MEANING = {
    "schedule": "until Spark has submitted the stage, including the wait for executors to come up",
    "worker": "until all tasks run in Python workers, including the wait for slots",
    "exchange": "until all tasks have exchanged their addresses, GPUs and versions",
    "agent": "until each node has its agent, the process that starts the ranks",
    "import": "until torch is imported, unless a process of an earlier run has already imported it",
    "fork": "until the ranks are forked",
    "call": "until the last rank has called the function, including the build of extensions",
    "function": "until the last function has returned",
    "exit": "until all ranks have ended",
    "collect": "until the values are on the driver",
}


def phases(submitted: float, collected: Collected, now: float) -> dict[str, float]:
    """Return the seconds that each phase of a run took, and their total. Times are in seconds since the epoch.

    A phase ends when the last node or rank has ended it, so the phases add up to the total.
    """
    moments = dict(collected.times)
    for report in collected.reports:
        for name, moment in report.times.items():
            moments[name] = max(moment, moments.get(name, moment))
        for outcome in report.outcomes:
            failed = None if outcome.failure is None else outcome.failure.time
            # A rank that was stopped in the function reports no end of it: that of the node's ranks counts.
            returned = outcome.returned or failed or report.times.get("exited")
            for name, last in (("called", outcome.called), ("returned", returned)):
                moments[name] = max(last or 0.0, moments.get(name, 0.0))
    timings, before = {}, submitted
    for phase, name in PHASES.items():
        end = max(before, moments.get(name, before))
        timings[phase], before = end - before, end
    timings["collect"] = max(0.0, now - before)
    rounded = {phase: round(seconds, 4) for phase, seconds in timings.items()}
    return {**rounded, "total": round(sum(rounded.values()), 4)}
