"""Where the time of a run went: from the moments that its job, nodes and ranks tell to seconds by phase. Pure."""

from __future__ import annotations

from distributor.values.outcome import Collected

#: Phases of a run, and the moment that ends each: of the Spark job, a node or a rank.
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

#: What each phase is, for people.
MEANING = {
    "schedule": "until Spark has submitted the stage",
    "worker": "until its tasks run in their Python workers, waiting for slots included",
    "exchange": "until each task knows the facts of all",
    "agent": "until each node has its agent",
    "import": "until torch is imported, where no warm process had done so",
    "fork": "until the ranks are forked",
    "call": "until the last rank has called the function",
    "function": "until the last function has returned",
    "exit": "until all ranks have ended",
    "collect": "until the values are on the driver",
}


def phases(submitted: float, collected: Collected, now: float) -> dict[str, float]:
    """Seconds by phase. Each ends when the last node or rank has ended it, so that together they are the total.

    Args:
        submitted: when the run was, in seconds since the epoch.
        collected: what came of it.
        now: when that was there.
    """
    moments = dict(collected.times)
    for report in collected.reports:
        for name, moment in report.times.items():
            moments[name] = max(moment, moments.get(name, moment))
        for outcome in report.outcomes:
            failed = None if outcome.failure is None else outcome.failure.time
            # A rank that was stopped tells nothing: it was in the function.
            returned = outcome.returned or failed or report.times.get("exited")
            for name, told in (("called", outcome.called), ("returned", returned)):
                moments[name] = max(told or 0.0, moments.get(name, 0.0))
    timings, before = {}, submitted
    for phase, name in PHASES.items():
        end = max(before, moments.get(name, before))
        timings[phase], before = end - before, end
    return {**timings, "collect": max(0.0, now - before), "total": now - submitted}
