"""Whether a run makes another attempt. Pure."""

from __future__ import annotations

from distributor.outcomes.causes import Cause, RankFailed


def again(cause: Cause | None, attempt: int, max_restarts: int) -> bool:
    """Return whether the ranks start again after an attempt that failed.

    A run that was cancelled, stalled or late is not started again, nor is one that lost a node, since the nodes that
    are left are too few.

    Args:
        cause: why the driver stopped the attempt; ``None`` if it did not.
        attempt: number of the attempt that failed, from 0.
        max_restarts: how many times the ranks may be started again.

    >>> again(RankFailed(), 0, 1), again(RankFailed(), 1, 1)
    (True, False)
    """
    if attempt >= max_restarts:
        return False
    if isinstance(cause, RankFailed):
        return not any(failure.kind == "GroupError" for failure in cause.failures)  # it would train alone again
    return cause is None
