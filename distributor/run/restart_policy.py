"""Decides whether a run makes another attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from distributor.outcomes.causes import Cause, RankFailed, Stalled
from distributor.outcomes.failures import is_infrastructure, order_failures
from distributor.outcomes.verdict import failures_of
from distributor.values.options import Recovery
from distributor.values.outcome import Failure

#: Kinds of failures that another attempt would have as well: ranks that train alone, and nodes that cannot start.
_LASTING = ("GroupError", "ResourceError", "StartError")


def again(cause: Cause | None, failures: Sequence[Failure], attempt: int, recovery: Recovery) -> bool:
    """Return whether to start the ranks again after a failed attempt.

    They are not started again if the attempt was cancelled or started too late, nor if it lost a node, since too few
    nodes are left.

    Args:
        cause: why the driver stopped the attempt; ``None`` if it did not.
        failures: the failures of ranks that nodes have told of.
        attempt: number of the attempt that failed, from 0.
        recovery: the user's options.

    >>> killed = Failure(1, 1, "host-a", "signal", "killed by SIGKILL", signal="SIGKILL")
    >>> again(RankFailed(), [killed], 0, Recovery(1)), again(RankFailed(), [killed], 1, Recovery(1))
    (True, False)
    """
    if attempt >= recovery.max_restarts:
        return False
    if isinstance(cause, Stalled):
        return True
    if not (cause is None or isinstance(cause, RankFailed)):
        return False
    told = failures_of(cause, failures)
    if any(failure.kind in _LASTING for failure in told):
        return False
    if recovery.restart_on == "any":
        return True
    return bool(told) and is_infrastructure(order_failures(told)[0])
