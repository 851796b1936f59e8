"""The result of a run: from the reports of its nodes to the values, or to the one exception that explains the failure.

Pure functions. The earliest failure is the root. A broken connection is the root only if no other failure explains it:
a rank whose peer was killed may notice before the peer's own node does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from distributor import errors
from distributor.outcomes.failures import describe, is_echo, order_failures
from distributor.shipping import payload
from distributor.text import cells
from distributor.text.wording import who
from distributor.values.outcome import Collected, Failure

#: Returns advice on a failure, or ``""`` if there is nothing to add.
Advise = Callable[[Failure], str]


def values(collected: Collected, world_size: int, advise: Advise = lambda failure: "") -> dict[int, Any]:
    """Return the return values by rank, as far as they were sent; none for a script or a module.

    Args:
        collected: what the scheduler brought back.
        world_size: the number of ranks.
        advise: returns advice on the root failure.

    Raises:
        TrainingError: a rank failed.
        NodeLostError: a node never reported, or ranks did not finish although none failed.
        ResultError: a rank succeeded but its value could not be pickled, or the driver cannot read it.
        StartError, ResourceError: a node could not start, or lacks what a rank needs.
    """
    for report in collected.reports:
        if report.error is not None:
            kind, message = report.error
            raise getattr(errors, kind)(message)
    outcomes = {outcome.rank: outcome for report in collected.reports for outcome in report.outcomes}
    failures = [outcome.failure for outcome in outcomes.values() if outcome.state == "failed" and outcome.failure]
    if failures:
        returned = {rank: outcome.returned for rank, outcome in sorted(outcomes.items()) if outcome.returned}
        raise training_error(failures, advise, returned)
    if collected.lost_hosts:
        raise node_lost(collected.lost_hosts)
    missing = sorted(set(range(world_size)) - {rank for rank, o in outcomes.items() if o.state != "stopped"})
    if missing:
        gave_up = [f"the node on {report.host} {report.gave_up}" for report in collected.reports if report.gave_up]
        were = "was stopped before it finished" if len(missing) == 1 else "were stopped before they finished"
        raise errors.NodeLostError(
            f"{who(missing)} {were}: "
            + ("; ".join(gave_up) or "an executor was lost, or the Spark job was ended from outside; no rank says why")
        )
    unreturned = [outcomes[rank] for rank in sorted(outcomes) if outcomes[rank].state == "unreturned"]
    if unreturned and unreturned[0].failure is not None:
        failure = unreturned[0].failure
        raise errors.ResultError(
            f"rank {failure.rank} on {failure.host} finished, but {failure.message}. "
            "Return plain data: numbers, strings, a state dict"
        )
    return {rank: payload.load_value(chunks, rank) for rank, chunks in sorted(collected.values.items())}


def training_error(
    failures: Sequence[Failure],
    advise: Advise = lambda failure: "",
    returned: Mapping[int, float] = MappingProxyType({}),
) -> errors.TrainingError | errors.StartError:
    """Return the exception for a run whose ranks failed: the root first, its original exception as ``__cause__``.

    It is a ``StartError`` if the root rank found, before it called any user code, that its node lacks something.

    Args:
        failures: the failures of the run's ranks.
        advise: returns advice on the root failure.
        returned: when each rank that returned did so, in seconds since the epoch.
    """
    told = [replace(failure, traceback=cells.readable(failure.traceback)) for failure in failures]
    ordered = order_failures(told)
    cause = payload.load_exception(ordered[0].exception)
    if isinstance(cause, errors.StartError):
        return errors.StartError(f"on {ordered[0].host}: {cause}")
    advice = advise(ordered[0])
    gone = [rank for rank, moment in returned.items() if moment < ordered[0].time]
    if gone and is_echo(ordered[0]):
        advice = f"{who(gone).capitalize()} had returned before: all ranks have to take part in each collective"
    return errors.TrainingError(describe(ordered, advice), ordered, cause)


def node_lost(nodes: Sequence[str]) -> errors.NodeLostError:
    """Return the exception for lost nodes. ``nodes`` are their hosts, with whatever else is known of them."""
    return errors.NodeLostError(
        f"lost the node on {'; '.join(sorted(set(nodes)))}. Its agent, Python worker or executor ended or was cut off "
        "while ranks were running (killed, out of memory, the machine or its network went away); "
        "the executor's own log says more"
    )
