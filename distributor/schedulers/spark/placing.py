"""Places a run's ranks on the executors on which Spark has started its tasks, or has it submitted again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from distributor.channel import frames, tasks
from distributor.errors import DistributorError, ResourceError, StartError
from distributor.launch import assign_ranks
from distributor.machine import versions
from distributor.text import notices
from distributor.text.wording import size
from distributor.values.job import Job
from distributor.values.messages import AllNodes, Placed, TaskFacts
from distributor.values.placement import NodeFacts, Placement, host_in

_log = notices.logger

_PART = 0.5  # of start_timeout, within which placements on avoided hosts are refused
_MOST = 20  # placements that are refused, at most


class Placing:
    """Places the ranks of one job, once for all tasks that Spark has started together."""

    def __init__(self, job: Job, room: Callable[[Mapping[str, int]], int]) -> None:
        self._job = job
        self._room = room  # how many of the tasks fit on other hosts, given how many run on each executor
        self._left = _MOST
        self._until = time.monotonic() + _PART * job.deadlines.start_timeout
        self.why = ""  # why the last placement was refused
        self.error: DistributorError | None = None  # why no run can begin on these executors

    def place(self, known: Sequence[TaskFacts]) -> tuple[list[Placed], Placement] | None:
        """Return what each task must know, by partition, and the placement; ``None`` if the tasks must end."""
        self.error = None
        facts = [task.facts for task in known]
        if not self.accepts(facts):
            return None
        try:
            return self._place(facts, known)
        except DistributorError as error:
            self.error = error
        except Exception as error:  # any other: the tasks wait for an answer
            self.error = StartError(f"the ranks cannot be placed: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        return None

    def _place(self, facts: Sequence[NodeFacts], known: Sequence[TaskFacts]) -> tuple[list[Placed], Placement]:
        placement = assign_ranks.place_checked(facts, self._job)
        whole = self._job.launch.all_nodes
        if whole:
            self._check_length(placement)
        shares = {share.node.executor: share for share in placement.shares(whole=False)}
        answers = []
        for fact, placed in zip(facts, tasks.among(known)):
            share = shares[fact.executor]
            warnings = versions.differences(self._job.versions, facts[0], facts[share.node.leader])
            answers.append(replace(placed, share=share, warnings=tuple(warnings), all_nodes=whole))
        return answers, placement

    def _check_length(self, placement: Placement) -> None:
        """Check that the list of all nodes, which each task gets, fits into a frame."""
        try:
            frames.pack(AllNodes(placement.nodes))
        except frames.ProtocolError:
            raise ResourceError(
                f"launch={self._job.launch.name} tells each node about all {len(placement.nodes):,} nodes, but their "
                f"list is longer than {size(frames.MAX_BODY)}: use fewer nodes or ports, or another launch path"
            ) from None

    def accepts(self, facts: Sequence[NodeFacts]) -> bool:
        """Return whether to begin with these tasks: none on a host that the job avoids, if all fit on others.

        A limited number is refused, for a limited time, so that the run begins even if Spark keeps choosing these
        hosts.
        """
        bad = {host for fact in facts if (host := host_in(fact.executor)) in self._job.avoided}
        if not bad or not self._left or time.monotonic() > self._until:
            return True
        running = Counter(host_in(fact.executor) for fact in facts)
        try:
            is_possible = self._room(running) >= self._job.num_tasks
        except Exception as error:  # Spark's context may be stopping
            _log.debug("run %s: cannot look for other hosts: %s", self._job.label, error)
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
        _log.warning("%s; placing run %s again", why, job.label)
