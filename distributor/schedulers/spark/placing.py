"""Whether a run begins on the executors on which Spark has placed its tasks, or is submitted again."""

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

_PART = 0.5  # of start_timeout, within which placements on avoided hosts are refused
_MOST = 20  # placements that are refused, at most


class Placing:
    """Accepts or refuses the executors on which Spark has started the tasks of one job."""

    def __init__(self, job: Job, room: Callable[[Mapping[str, int]], int]) -> None:
        self._job = job
        self._room = room  # how many of the tasks fit on other hosts, given how many run on each executor
        self._left = _MOST
        self._until = time.monotonic() + _PART * job.deadlines.start_timeout
        self.why = ""  # why the last placement was refused

    def accepts(self, facts: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether to begin with these tasks: none on a host that the job avoids, if all fit on others.

        A limited number is refused, for a limited time, so that the run begins even if Spark keeps choosing these
        hosts.
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
    """Return in words that an executor has more ranks than it may host."""
    return f"Spark put more ranks on an executor than the {job.node_limit} that it may host"


def refuse(job: Job, why: str, times: int, too_late: bool) -> None:
    """Warn, the first time, that Spark must place the tasks again. StartError: the run's start timeout has passed."""
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
