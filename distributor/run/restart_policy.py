"""Decides whether a run makes another attempt. Pure."""

from __future__ import annotations

from distributor.outcomes.causes import Cause, RankFailed


def again(cause: Cause | None, attempt: int, max_restarts: int) -> bool:
    """Return whether to restart the ranks after a failed attempt.

    Ranks are not restarted if the attempt was cancelled, stalled or started too late, nor if it lost a node, since too
    few nodes are left.

    Args:
        cause: why the driver stopped the attempt; ``None`` if it did not.
        attempt: number of the attempt that failed, from 0.
        max_restarts: maximum number of restarts.

    >>> again(RankFailed(), 0, 1), again(RankFailed(), 1, 1)
    (True, False)
    """
    if attempt >= max_restarts:
        return False
    if isinstance(cause, RankFailed):
        return not any(failure.kind == "GroupError" for failure in cause.failures)  # its ranks would train alone again
    return cause is None
