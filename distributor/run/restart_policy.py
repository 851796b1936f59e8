"""Whether a run makes another attempt, on the same nodes or in a new job. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
from distributor.outcomes.driver_failures import is_final
from distributor.outcomes.failures import is_consequence, is_infrastructure, order_failures
from distributor.outcomes.verdict import failures_of
from distributor.text.wording import NOT_READY
from distributor.values.options import Recovery
from distributor.values.outcome import Failure

#: Kinds of failures that would happen again: ranks that train alone, and nodes that cannot start.
_LASTING = ("GroupError", "ResourceError", "StartError")

#: Errors of a job that could not start. They end the run only in its first attempt.
_NOT_STARTED = (StartError, ResourceError)

_PATIENCE = 3  # attempts in a row without progress after which a run ends


def again(cause: Cause | None, failures: Sequence[Failure], attempt: int, recovery: Recovery) -> bool:
    """Return whether ranks start again on the same nodes after an attempt. Without a cause, the driver did not stop it.

    They do not if the run was cancelled, was not up within ``start_timeout``, or lost a node. Unless it was cancelled,
    a new job may follow; see :func:`again_in_new_job`.

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
    """Return whether a new job follows one that has ended with an error in this attempt.

    ``excused`` earlier attempts, which ended by preemption or for more ranks (``widens``), do not count as failed:
    ``recovery`` allows one more restart for each.

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
    """Return whether another attempt certainly follows, whatever the nodes of the stopping attempt still report.

    Then ranks are killed sooner. A broken connection makes nothing certain: an exception in the user's code on another
    rank may have broken it, and no attempt follows such an exception unless ``restart_on="any"``.

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
    if leaves_doubt(cause, recovery):
        return False
    if recovery.restart_on == "any":
        return True
    return isinstance(cause, NodeLost) or any(failure.kind == "signal" for failure in cause.failures)


def leaves_doubt(cause: Cause, recovery: Recovery) -> bool:
    """Return whether another attempt can no more be certain after a cause, whatever is reported besides."""
    failures = cause.failures if isinstance(cause, RankFailed | NodeLost) else ()
    if any(failure.kind in _LASTING for failure in failures):
        return True
    return recovery.restart_on != "any" and not all(
        failure.kind == "signal" or is_consequence(failure) for failure in failures
    )


def _may_pass(failures: Sequence[Failure], recovery: Recovery) -> bool:
    """Return whether another attempt may succeed after these failures."""
    if any(failure.kind in _LASTING for failure in failures):
        return False
    if recovery.restart_on == "any":
        return True
    return bool(failures) and is_infrastructure(order_failures(failures)[0])


def is_stuck(steps: Sequence[int | None], killed: Collection[int] = (), saved: Sequence[int | None] = ()) -> bool:
    """Return whether the last three attempts reached no later step than those before them, if any of these is known.

    Attempts in ``killed`` by the machine before their first step do not count: they say nothing about the code. If an
    attempt has lost steps, later ones make progress below them: each has ``saved`` a later checkpoint than all before.

    >>> is_stuck([40, 40, None, 39]), is_stuck([40, 40, 41, 41]), is_stuck([None, None, None, None])
    (True, False, False)
    >>> is_stuck([40, None, None, None]), is_stuck([40, None, None, None], killed=[2])
    (True, False)
    >>> is_stuck([140, 110, 120, 130], saved=[100, 110, 120, 130]), is_stuck([140] * 4, saved=[100, None, 100, 100])
    (False, True)
    """
    counted = [number for number, step in enumerate(steps) if step is not None or number not in killed]
    before, last = counted[:-_PATIENCE], counted[-_PATIENCE:]

    def grows(values: Sequence[int | None]) -> bool:
        earlier, later = (max((values[each] or 0 for each in part), default=0) for part in (before, last))
        return later > earlier

    return any(steps[each] is not None for each in before) and not grows(steps) and not (saved and grows(saved))
