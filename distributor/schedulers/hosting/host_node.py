"""Runs the agent of a node and gets the agent's report. Spark tasks and local mode use this module."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from distributor.channel import control
from distributor.machine import folders, processes
from distributor.schedulers.hosting.agents import Agent, anew
from distributor.schedulers.hosting.warm import from_warm
from distributor.values import messages
from distributor.values.environment import node_id
from distributor.values.job import Warmth
from distributor.values.messages import NodeResult
from distributor.values.plan import AgentOrder


class HostedNode:
    """The handle of a node, in the process that owns the node's agent (a Spark task's worker or the driver).

    :func:`host_node` creates this object.

    Attributes:
        folder: the node's private folder.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
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
        """Start the node's agent; see :func:`start_agent`."""
        self._agent, self._line = start_agent(
            root, inherit, owner=owner, warmth=warmth, task_cpus=task_cpus, wanted=wanted, importing=importing
        )
        return self._agent

    def converse(self, order: AgentOrder) -> NodeResult | None:
        """Tell the agent what to run, and return the agent's result; ``None`` if the agent died before sending it."""
        assert self._line is not None
        try:
            control.send(self._line, vars(order))
        except OSError:
            return None
        answer = control.receive(self._line)
        result = None if answer is None else messages.decode(answer)
        return result if isinstance(result, NodeResult) else None

    def end(self) -> None:
        """Close the connection to the agent, so that the agent cleans up and ends. Wait until the agent has ended."""
        if self._line is not None:
            self._line.close()
        if self._agent is not None:
            self._agent.wait()


@contextmanager
def host_node(job_id: str, leader: int) -> Iterator[HostedNode]:
    """Host one node of a run during the ``with`` block. At the end, kill the node's processes, and remove its folder.

    A keeper (a process that keeps the states of ranks in shared memory for the run's next job) is not killed.

    Args:
        job_id: identifier of the job.
        leader: partition of the Spark task that hosts the node; in local mode, the node's first rank.

    Example:
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


def start_agent(
    root: str,
    inherit: Mapping[str, socket.socket],
    *,
    owner: int,
    warmth: Warmth | None = None,
    task_cpus: int = 1,
    wanted: Callable[[], bool] = lambda: True,
    importing: Callable[[str], None] = lambda module: None,
) -> tuple[Agent, socket.socket]:
    """Start an agent in its own process session. Return the agent, and a socket by which to control the agent.

    The agent has this process's environment, current directory, standard output and standard error.

    Args:
        root: the folder or zip from which the package can be imported.
        inherit: sockets that the agent gets, by name; they stay open in this process.
        owner: pid of the executor or driver that a warm process serves. The warm process ends when its owner ends.
        warmth: what the job requires of a warm process; with ``None``, the agent is started without a warm process.
        task_cpus: number of CPUs of one task.
        wanted: returns whether the agent is still wanted; called while this process waits for a warm process. If it
            returns ``False``, this process waits no longer, and starts the agent without a warm process.
        importing: called while this process waits for a warm process that imports modules: with the name of the module
            that is being imported, whenever a new one is seen, and with "" when the warm process has answered.
    """
    if warmth is not None:
        with suppress(OSError):  # such as a full disk: the agent then starts without a warm process
            started = from_warm(root, inherit, owner, warmth, task_cpus, wanted, importing)
            if started is not None:
                return started
    return anew(root, inherit)
