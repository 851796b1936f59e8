"""Runs the agent of a node and gets its report, for Spark tasks and for local mode."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from distributor.channel import control
from distributor.machine import folders, processes
from distributor.schedulers.hosting.agents import Agent, anew
from distributor.schedulers.hosting.warm_client import from_warm
from distributor.values import messages
from distributor.values.environment import node_id
from distributor.values.job import Warmth
from distributor.values.messages import NodeResult
from distributor.values.plan import AgentOrder


class HostedNode:
    """A node, in the process that owns its agent: a Spark task's worker or the driver."""

    def __init__(self, folder: str) -> None:
        self.folder = folder  # private to the node
        self._agent: Agent | None = None
        self._line: socket.socket | None = None

    def start(
        self,
        root: str,
        inherit: Mapping[str, socket.socket],
        *,
        owner: int,
        warmth: Warmth | None = None,
        task_cpus: int = 1,
        wanted: Callable[[], bool] = lambda: True,
        importing: Callable[[str], None] = lambda module: None,
    ) -> Agent:
        """Start the node's agent in its own process session, with this process's environment, directory and output.

        ``root`` is the folder or zip from which this package is imported; ``owner`` is the pid of the executor or
        driver with which a warm process ends. Without ``warmth``, or once ``wanted()`` is false, no warm process is
        used. While this process waits for one, ``importing`` gets the name of each module that is being imported, and
        "" at the end.
        """
        started = None
        if warmth is not None:
            with suppress(OSError):  # such as a full disk: the agent then starts without a warm process
                started = from_warm(root, inherit, owner, warmth, task_cpus, wanted, importing)
        self._agent, self._line = started or anew(root, inherit)
        return self._agent

    def converse(self, order: AgentOrder) -> NodeResult | None:
        """Tell the agent what to run, and return its result; ``None`` if it died before sending it."""
        assert self._line is not None
        try:
            control.send(self._line, vars(order))
        except OSError:
            return None
        answer = control.receive(self._line)
        result = None if answer is None else messages.decode(answer)
        return result if isinstance(result, NodeResult) else None

    def end(self) -> None:
        """Close the control line, so that the agent cleans up and ends, and wait until it has."""
        if self._line is not None:
            self._line.close()
        if self._agent is not None:
            self._agent.wait()


@contextmanager
def host_node(job_id: str, leader: int) -> Iterator[HostedNode]:
    """Host one node during the ``with`` block. At the end, kill its processes, and remove its folder.

    A keeper of ranks' states is not killed. ``leader`` is the partition of the Spark task that hosts the node; in local
    mode, the node's first rank.

    >>> with host_node("3f2a", 0) as node:  # doctest: +SKIP
    ...     agent = node.start(root, {"store": listener}, owner=os.getpid())
    ...     result = node.converse(order)
    """
    folder = folders.make(job_id)
    claimed = folders.claim(folder)  # so that later runs remove the folder if this process is killed
    node = HostedNode(folder)
    try:
        yield node
    finally:
        node.end()
        processes.kill_node(node_id(job_id, leader))
        folders.remove(folder)
        claimed.close()
