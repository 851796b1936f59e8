"""The verdict on a run: its values, or the one exception that explains why there are none.

The earliest failure is the root, unless it is a broken connection that another failure explains: the peers of a killed
rank may notice its end before its node does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import distributor.errors
from distributor.errors import (
    CompanionError,
    DistributorError,
    GroupError,
    NodeLostError,
    PreemptionError,
    ResourceError,
    ResultError,
    RunCancelledError,
    StallError,
    StartError,
    StopError,
    TrainingError,
)
from distributor.outcomes.causes import (
    Cancelled,
    Cause,
    Disagreed,
    NodeLost,
    Preempted,
    RankFailed,
    Stalled,
    StartTimeout,
    Unfit,
    disagreement,
)
from distributor.outcomes.driver_failures import UNKNOWN, Loss, is_final, is_mishap, loss_of, typed
from distributor.outcomes.failures import describe, has_cause, order_failures
from distributor.shipping import pickling
from distributor.text import cells, escapes
from distributor.text.wording import who
from distributor.values.echoes import is_echo
from distributor.values.job import Status
from distributor.values.outcome import Collected, Failure

#: Clocks count as equal up to this number of seconds: the report of a failure may take as long to reach the driver.
_APART = 1.0

#: Errors that explain the end of a run by themselves.
_TRUE = (StartError, ResourceError, CompanionError, GroupError, StopError)

#: Returns advice on the root failure, or ``""``.
Advise = Callable[[Failure], str]


@dataclass(frozen=True)
class Verdict:
    """The return values by rank, or the error that explains why there are none.

    If ranks were preempted, there are values beside the error: what the ranks returned when they stopped early.
    """

    values: Mapping[int, Any] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def status(self) -> Status:
        if self.error is None:
            return Status.SUCCEEDED
        return Status.CANCELLED if isinstance(self.error, RunCancelledError) else Status.FAILED


def verdict(
    cause: Cause | None,
    collected: Collected | None,
    error: BaseException | None,
    *,
    label: str,
    world_size: int,
    advise: Advise = lambda failure: "",
    local: bool = False,
    preempted: Preempted | None = None,
) -> Verdict:
    """Decide between a run's values and the exception that best explains why there are none.

    ``preempted`` is why ranks were asked to stop together, if it was not the user who asked.

    >>> verdict(Cancelled(), None, None, label="3f2a", world_size=2).error
    RunCancelledError('run 3f2a was cancelled')
    """
    # First why the driver stopped ranks: they may exit with 0 within the grace period, as if they had succeeded.
    if isinstance(cause, Cancelled):
        why = f": {cause.why}" if cause.why else ""
        return Verdict(error=RunCancelledError(f"run {label} was cancelled{why}"))
    if isinstance(cause, Stalled):
        return Verdict(error=StallError(cause.message, stacks=cause.stacks))
    if isinstance(cause, Disagreed):
        return Verdict(error=StopError(cause.message))
    if isinstance(cause, StartTimeout) and collected is not None and (failed := _agent_error(collected)) is not None:
        return Verdict(error=failed)
    if isinstance(cause, StartTimeout | Unfit):
        return Verdict(error=StartError(cause.message))
    if collected is not None:
        try:
            judged = _judged(cause, collected, world_size, advise, local)
            return Verdict(judged, _cut_short(collected, preempted))
        except BaseException as raised:
            error = raised
    assert error is not None
    error = typed(error)
    with suppress(Exception):  # a node may have sent invalid data: keep the error
        error = _best(cause, error, advise, local)
    return Verdict(error=error)


def _judged(
    cause: RankFailed | NodeLost | None, collected: Collected, world_size: int, advise: Advise, local: bool
) -> dict[int, Any]:
    """Return the ranks' values, or raise the exception that says why there are none."""
    failures = [o.failure for report in collected.reports for o in report.outcomes if o.state == "failed"]
    if isinstance(cause, NodeLost) and not has_cause(failures) and not _is_whole(collected, world_size):
        raise node_lost(cause.nodes, local)
    return values(collected, world_size, advise, () if cause is None else cause.failures, local)


def _cut_short(collected: Collected, preempted: Preempted | None) -> PreemptionError | None:
    """Return an error if ranks returned early because something other than the user told them to stop."""
    halted = collected.halted
    if (wrong := disagreement(halted)) is not None:
        raise StopError(wrong)
    if halted and preempted is not None:
        return PreemptionError(preempted.message(next(iter(halted.values()))))
    return None


def _is_whole(collected: Collected, world_size: int) -> bool:
    """Return whether all ranks have succeeded and all results have arrived, even if nodes were lost later.

    A stopped rank may exit with 0 as if it had succeeded, so each node must also report that the run was not stopped.
    """
    outcomes = [outcome for report in collected.reports for outcome in report.outcomes]
    succeeded = {outcome.rank for outcome in outcomes if outcome.state in ("finished", "unreturned")}
    whole = not collected.lost_hosts and len(succeeded) == world_size
    return whole and all(report.passed for report in collected.reports)


def _best(cause: RankFailed | NodeLost | None, error: BaseException, advise: Advise, local: bool) -> BaseException:
    """Return the exception that best explains a run that ended with ``error``."""
    failed = cause is not None and has_cause(cause.failures)
    if isinstance(error, _TRUE) and not (failed and is_mishap(error)):
        return error
    if isinstance(error, TrainingError) and not isinstance(error, NodeLostError):
        return error
    if cause is None:
        return error
    # A rank's failure that was reported during the run explains more than the later loss of its node or job.
    if cause.failures and (isinstance(cause, RankFailed) or failed):
        return training_error(cause.failures, advise)
    if isinstance(cause, NodeLost) and not is_final(error):
        return node_lost(cause.nodes, local, loss_of(error))
    return error


def values(
    collected: Collected,
    world_size: int,
    advise: Advise = lambda failure: "",
    reported: Sequence[Failure] = (),
    local: bool = False,
) -> dict[int, Any]:
    """Return the ranks' return values, or raise why one is missing. ``reported`` are as in :func:`on_one_clock`."""
    if (why := _agent_error(collected)) is not None:
        raise why
    for report in collected.reports:
        if report.error is not None:
            raise _told(report.error)
    outcomes = {outcome.rank: outcome for report in collected.reports for outcome in report.outcomes}
    failures = [outcome.failure for outcome in outcomes.values() if outcome.state == "failed" and outcome.failure]
    if failures:
        failures = on_one_clock(failures, reported)
        returned = {rank: outcome.returned for rank, outcome in sorted(outcomes.items()) if outcome.returned}
        raise training_error(failures, advise, returned)
    if collected.lost_hosts:
        raise node_lost(collected.lost_hosts, local)
    missing = sorted(set(range(world_size)) - {rank for rank, o in outcomes.items() if o.state != "stopped"})
    if missing:
        gave_up = [f"the node on {report.host} {report.gave_up}" for report in collected.reports if report.gave_up]
        were = "was stopped before it finished" if len(missing) == 1 else "were stopped before they finished"
        raise NodeLostError(
            f"{who(missing)} {were}: "
            + (
                "; ".join(gave_up)
                or ("the agent ended" if local else "an executor was lost, or the Spark job was ended from outside")
                + "; no rank reported why"
            )
        )
    unreturned = [outcomes[rank] for rank in sorted(outcomes) if outcomes[rank].state == "unreturned"]
    if unreturned and unreturned[0].failure is not None:
        failure = unreturned[0].failure
        message = escapes.colours(failure.message)
        raise ResultError(f"rank {failure.rank} on {failure.host} finished, but {message}")
    return {rank: pickling.load_value(chunks, rank) for rank, chunks in sorted(collected.values.items())}


def _agent_error(collected: Collected) -> DistributorError | None:
    """Return the error of a node whose agent failed, as it prepared the node: others' errors may follow from it."""
    return next((_told(each.error) for each in collected.reports if each.node_rank < 0 and each.error), None)


def _told(error: tuple[str, str]) -> DistributorError:
    kind, message = error
    told: DistributorError = getattr(distributor.errors, kind)(escapes.colours(message))
    return told


def on_one_clock(failures: Sequence[Failure], reported: Sequence[Failure]) -> list[Failure]:
    """Return the failures, with times by the driver's clock if their host's is known to differ.

    ``reported`` are failures that came while the run went on, with times by the driver's clock.
    """
    times = {failure.rank: failure.time for failure in reported}
    ahead: dict[str, float] = {}
    for failure in failures:
        if failure.rank in times:
            late = times[failure.rank] - failure.time
            ahead[failure.host] = min(late, ahead.get(failure.host, late))
    apart = {host: late for host, late in ahead.items() if abs(late) > _APART}
    return [replace(failure, time=failure.time + apart.get(failure.host, 0.0)) for failure in failures]


def failures_of(cause: Cause | None, ended: Sequence[Failure]) -> list[Failure]:
    """Return the failures of one attempt, by the driver's clock where possible: at its ``ended``, and before."""
    reported = cause.failures if isinstance(cause, RankFailed) else ()
    return [*on_one_clock(ended, reported), *reported]


def training_error(
    failures: Sequence[Failure],
    advise: Advise = lambda failure: "",
    returned: Mapping[int, float] = MappingProxyType({}),
) -> TrainingError | StartError | ResourceError | GroupError:
    """Return the exception for failed ranks. Its text begins with the root.

    It is a ``StartError`` or ``ResourceError`` if the root rank found, before it called user code, that its node lacks
    something, a ``GroupError`` if ranks never joined a process group, or else a ``TrainingError`` from the root's
    exception. ``returned`` says when ranks have returned, in seconds since the epoch.
    """
    readable = [replace(failure, traceback=cells.readable(failure.traceback)) for failure in failures]
    ordered = order_failures(readable)
    cause = pickling.load_exception(ordered[0].exception)
    for kind in (StartError, ResourceError):
        if isinstance(cause, kind):
            return kind(f"on {ordered[0].host}: {cause}")
    if isinstance(cause, GroupError):
        return GroupError(f"{who([failure.rank for failure in ordered])} {cause}")
    advice = advise(ordered[0])
    gone = [rank for rank, moment in returned.items() if moment < ordered[0].time]
    if gone and is_echo(ordered[0]):
        advice = f"{who(gone).capitalize()} had already returned: all ranks must take part in each collective"
    return TrainingError(escapes.colours(describe(ordered, advice)), ordered, cause)


def node_lost(nodes: Sequence[str], local: bool = False, loss: Loss = UNKNOWN) -> NodeLostError:
    """Return the exception for lost nodes, each in words."""
    lost = f"lost the node on {escapes.colours('; '.join(sorted(set(nodes))))}."
    if local:
        return NodeLostError(
            f"{lost} Its agent, the process that watches the ranks, ended while they were running (killed, perhaps for "
            "lack of memory): see the kernel's log"
        )
    if loss.said:
        lost += f" Spark says: {escapes.colours(loss.said)}."
    if loss.explanation:
        return NodeLostError(f"{lost} {loss.explanation}")
    return NodeLostError(
        f"{lost} Its agent, Python worker or executor ended or was cut off while ranks were running (killed, out of "
        "memory, or the machine or its network failed): see the executor's own log"
    )
