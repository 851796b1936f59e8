"""Decide whether a run begins on the executors on which Spark has placed its tasks, or is submitted again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributor.errors import StartError
from distributor.text import notices
from distributor.values.job import Job
from distributor.values.placement import host_in

_log = notices.logger

#: The fraction of ``start_timeout`` within which a run refuses placements on hosts that it avoids, because two of its
#: attempts have failed there.
_PART = 0.5

#: Maximum number of placements that a run refuses because they are on hosts that it avoids.
_MOST = 20


class Placing:
    """Accepts or refuses the executors on which Spark has started the tasks of one job.

    Args:
        job: says which hosts to avoid.
        room: returns how many of the job's tasks fit on the hosts that the job does not avoid. Its argument says how
            many tasks of the job run on each executor. The slots of these tasks count as free.
    """

    def __init__(self, job: Job, room: Callable[[Mapping[str, int]], int]) -> None:
        self._job = job
        self._room = room
        self._left = _MOST
        self._until = time.monotonic() + _PART * job.deadlines.start_timeout
        #: Why the last placement was refused, in words.
        self.why = ""

    def accepts(self, facts: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether to begin the run with the tasks that ``facts`` describes.

        No task may be on a host that the job avoids (two attempts have failed there) if all tasks fit on other hosts.
        At most :data:`_MOST` placements are refused for this reason, and none after half of ``start_timeout``, so that
        the run begins even if Spark keeps choosing these hosts.

        Args:
            facts: for each task, a mapping whose entry ``"facts"`` describes the task's node (executor, GPUs, ...).
        """
        bad = {host for each in facts if (host := _host(each)) in self._job.avoided}
        if not bad or not self._left or time.monotonic() > self._until:
            return True
        own = Counter(str(each["facts"]["executor"]) for each in facts)
        try:
            is_possible = self._room(own) >= self._job.num_tasks
        except Exception as error:  # Spark's context may be stopping
            _log.debug("run %s: cannot look for other hosts: %s", self._job.run_id, error)
            return True
        if is_possible:
            self._left -= 1
            self.why = f"Spark put ranks on {', '.join(sorted(bad))}, where two attempts of this run have failed"
        return not is_possible


def crowded(job: Job) -> str:
    """Return the reason, in words, to refuse a placement: an executor has more ranks than it may host."""
    return f"Spark put more ranks on an executor than the {job.node_limit} that it may host"


def refuse(job: Job, why: str, times: int, too_late: bool) -> None:
    """Log, the first time only, a warning that Spark must place the run's tasks again, and why.

    Args:
        job: the job.
        why: why the placement is refused.
        times: number of placements that were refused, this one included.
        too_late: whether the run's start timeout has passed.

    Raises:
        StartError: the run's start timeout has passed.
    """
    if too_late:
        raise StartError(
            f"the run did not start within start_timeout={job.deadlines.start_timeout:g} s: {why}, {times} times. "
            "The other executors may have too few free slots, because other jobs hold them, or because these executors "
            "have fewer cores: free the slots, or give all executors the same number of cores (spark.executor.cores)"
        )
    if times == 1:
        _log.warning("%s; placing run %s again", why, job.run_id)


def _host(entry: Mapping[str, Any]) -> str:
    return host_in(str(entry["facts"]["executor"]))
