"""Decide which hosts a run's next job avoids: hosts on which two of the run's attempts failed. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from distributor.outcomes.failures import order_failures
from distributor.run.nodes import Nodes
from distributor.values.outcome import Failure
from distributor.values.placement import host_in

#: Number of failed attempts after which a host is avoided.
_MOST = 2


def blamed(nodes: Nodes, failures: Sequence[Failure]) -> str | None:
    """Return the executor on which an attempt failed, if the executor's host may be at fault; otherwise ``None``.

    A host may be at fault if a node was lost, or if the failure that caused the others is that of a rank killed by a
    signal. Other failures do not point to a host: for example, the user's code would fail on any host.

    Args:
        nodes: the nodes of the attempt.
        failures: the rank failures that nodes have reported.
    """
    if nodes.first_lost is not None:
        return nodes.first_lost
    root = order_failures(failures)[0] if failures else None
    if root is None or root.signal is None or nodes.placement is None:
        return None
    return next((node.executor for node in nodes.placement.nodes if root.rank in node.ranks), None)


def hosts_to_avoid(executors: Iterable[str | None]) -> tuple[str, ...]:
    """Return the hosts on which at least two attempts failed, sorted.

    Args:
        executors: what :func:`blamed` returned for each attempt. Spark names an executor by its host and a port.

    >>> hosts_to_avoid(["host-a:4000", "host-b:4001", None, "host-a:4002", None])
    ('host-a',)
    """
    counts = Counter(host_in(executor) for executor in executors if executor is not None)
    return tuple(sorted(host for host, count in counts.items() if count >= _MOST))
