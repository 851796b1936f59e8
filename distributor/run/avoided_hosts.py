"""Which hosts a run's next job avoids: those on which two of the run's attempts failed. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from distributor.outcomes.failures import is_broken_gpu, order_failures
from distributor.run.nodes import Nodes
from distributor.values.outcome import Failure
from distributor.values.placement import host_in

_MOST = 2  # failed attempts before a host is avoided


def blamed(nodes: Nodes, failures: Sequence[Failure]) -> str | None:
    """Return the executor whose host may be at fault for a failed attempt; ``None`` if no host may be.

    A host may be at fault for a lost node, or if the rank whose failure caused the others was killed by a signal or has
    a broken GPU. The user's code would fail on any host.
    """
    if nodes.first_lost is not None:
        return nodes.first_lost
    root = order_failures(failures)[0] if failures else None
    if root is None or nodes.placement is None or not (root.signal or is_broken_gpu(root)):
        return None
    return next((node.executor for node in nodes.placement.nodes if root.rank in node.ranks), None)


def hosts_to_avoid(executors: Iterable[str | None]) -> tuple[str, ...]:
    """Return the hosts that :func:`blamed` named for at least two attempts, sorted. An executor is a host and a port.

    >>> hosts_to_avoid(["host-a:4000", "host-b:4001", None, "host-a:4002", None])
    ('host-a',)
    """
    counts = Counter(host_in(executor) for executor in executors if executor is not None)
    return tuple(sorted(host for host, count in counts.items() if count >= _MOST))
