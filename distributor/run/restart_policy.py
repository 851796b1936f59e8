"""Decides whether a run makes another attempt, on the same nodes or in a new job. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from distributor.errors import (
    CompanionError,
    NodeLostError,
    PreemptionError,
    ResourceError,
    ResultError,
    StallError,
    StartError,
    StopError,
    TrainingError,
)
from distributor.outcomes.causes import Cause, Disagreed, NodeLost, RankFailed, Stalled
from distributor.outcomes.failures import is_consequence, is_infrastructure, order_failures
from distributor.outcomes.mishaps import is_final
from distributor.outcomes.verdict import failures_of
from distributor.text.wording import NOT_READY
from distributor.values.options import Recovery
from distributor.values.outcome import Failure

#: Kinds of failures that would happen again in another attempt: ranks that train alone, and nodes that cannot start.
_LASTING = ("GroupError", "ResourceError", "StartError")

#: Errors of a job that could not start. They end the run only if they happen in its first attempt.
_NOT_STARTED = (StartError, ResourceError)

#: Number of attempts in a row after which a run ends if none of them reaches a later step than the attempts before.
_PATIENCE = 3


def again(cause: Cause | None, failures: Sequence[Failure], attempt: int, recovery: Recovery) -> bool:
    """Return whether to start the ranks again on the same nodes after a failed attempt.

    The ranks are started again after a stall, after ranks have stopped at different steps, and after rank failures that
    ``restart_on`` covers. They are not started again on the same nodes if the run was cancelled, was not up within
    ``start_timeout``, or lost a node. Unless the run was cancelled, a new job may follow; see :func:`again_in_new_job`.

    Args:
        cause: why the driver stopped the attempt; ``None`` if it did not.
        failures: the rank failures that nodes have reported.
        attempt: number of the attempt that failed, from 0.
        recovery: the user's options for restarts.

    >>> killed = Failure(1, 1, "host-a", "signal", "killed by SIGKILL", signal="SIGKILL")
    >>> again(RankFailed(), [killed], 0, Recovery(1)), again(RankFailed(), [killed], 1, Recovery(1))
    (True, False)
    """
    if attempt >= recovery.max_restarts:
        return False
    if isinstance(cause, Stalled | Disagreed):
        return True
    if not (cause is None or isinstance(cause, RankFailed)):
        return False
    return _may_pass(failures_of(cause, failures), recovery)


def again_in_new_job(
    error: BaseException, attempt: int, recovery: Recovery, *, widens: bool = False, excused: int = 0
) -> bool:
    """Return whether to submit a new job after a job has ended with an error.

    Args:
        error: the error with which the run ends if no new job follows.
        attempt: number of the job's last attempt, from 0.
        recovery: the user's options for restarts.
        widens: whether ranks have stopped so that the run can go on with more ranks.
        excused: number of earlier attempts that do not count as failed, because ranks were preempted, or were stopped
            so that the run could go on with more ranks. ``recovery`` allows one more restart for each such attempt.

    >>> lost = NodeLostError("lost the node on host-b")
    >>> again_in_new_job(lost, 0, Recovery(1)), again_in_new_job(StartError("no torch"), 0, Recovery(1))
    (True, False)
    """
    if isinstance(error, PreemptionError):
        return widens or recovery.max_restarts > excused  # a preemption does not count as a restart
    if attempt >= recovery.max_restarts or is_final(error):
        return False
    if isinstance(error, _NOT_STARTED) or (isinstance(error, CompanionError) and NOT_READY in str(error)):
        return attempt > 0
    if isinstance(error, StallError | CompanionError | StopError):
        return True
    if isinstance(error, ResultError):
        return recovery.restart_on == "any"
    if not isinstance(error, TrainingError):
        return False
    lost = isinstance(error, NodeLostError) and not error.failures
    return lost or _may_pass(error.failures, recovery)


def surely_again(cause: Cause, attempt: int, recovery: Recovery) -> bool:
    """Return whether another attempt certainly follows, whatever else the nodes of the stopping attempt report.

    If another attempt is certain, nodes kill each rank as soon as it is not writing a file, so that the next attempt
    can start soon. A rank's broken connection does not make another attempt certain: an exception in the user's code on
    another rank may have broken it, and no attempt follows such an exception unless ``restart_on="any"``.

    Args:
        cause: why the driver stops the attempt, as far as it is known.
        attempt: number of the attempt, from 0.
        recovery: the user's options for restarts.

    >>> echo = Failure(1, 1, "host-a", "RuntimeError", "Connection closed by peer")
    >>> surely_again(NodeLost(("host-b",), (echo,)), 0, Recovery(1)), surely_again(RankFailed((echo,)), 0, Recovery(1))
    (True, False)
    """
    if attempt >= recovery.max_restarts:
        return False
    if isinstance(cause, Stalled | Disagreed):
        return True
    if not isinstance(cause, RankFailed | NodeLost):
        return False
    if any(failure.kind in _LASTING for failure in cause.failures):
        return False
    if recovery.restart_on == "any":
        return True
    killed = isinstance(cause, NodeLost) or any(failure.kind == "signal" for failure in cause.failures)
    return killed and all(failure.kind == "signal" or is_consequence(failure) for failure in cause.failures)


def _may_pass(failures: Sequence[Failure], recovery: Recovery) -> bool:
    """Return whether another attempt may succeed after an attempt with these failures of ranks."""
    if any(failure.kind in _LASTING for failure in failures):
        return False
    if recovery.restart_on == "any":
        return True
    return bool(failures) and is_infrastructure(order_failures(failures)[0])


def is_stuck(steps: Sequence[int | None]) -> bool:
    """Return whether the last three attempts have reached no later step than the attempts before them.

    Args:
        steps: the last step of each attempt that has ended, in order; ``None`` for an attempt whose steps are not
            known. If none of the attempts before the last three has a step, the result is ``False``.

    >>> is_stuck([40, 40, None, 39]), is_stuck([40, 40, 41, 41]), is_stuck([None, None, None, None])
    (True, False, False)
    """
    before, last = steps[:-_PATIENCE], steps[-_PATIENCE:]
    reached = [step for step in before if step is not None]
    return bool(reached) and all(step is None or step <= max(reached) for step in last)
