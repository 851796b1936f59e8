"""The one way to run an agent for a node and to hear what became of it, for a Spark task and for local mode alike."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from distributor.channel import control
from distributor.hosting.agents import Agent, anew
from distributor.hosting.warm import from_warm
from distributor.machine import folders, processes
from distributor.values.environment import node_id
from distributor.values.job import Warmth


class HostedNode:
    """A node as its owner sees it. Made by :func:`host_node`.

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

    def converse(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        """Give the agent its order and wait for its report; ``None`` if it died before."""
        assert self._line is not None
        try:
            control.send(self._line, order)
        except OSError:
            return None
        report: dict[str, Any] | None = control.receive(self._line)
        return report

    def end(self) -> None:
        """Let the agent go, and wait until it has ended."""
        if self._line is not None:
            self._line.close()
        if self._agent is not None:
            self._agent.wait()


@contextmanager
def host_node(run_id: str, leader: int) -> Iterator[HostedNode]:
    """Host one node of a run: nothing of it, process or file, is left behind at the end.

    Args:
        run_id: identifier of the run.
        leader: partition of the task that hosts the node.

    Example:
        >>> with host_node("3f2a", 0) as node:  # doctest: +SKIP
        ...     agent = node.start(root, {"store": listener}, owner=os.getpid())
        ...     report = node.converse(order)
    """
    folder = folders.make(run_id)
    claimed = folders.claim(folder)  # until the agent claims it: this process may be killed before
    node = HostedNode(folder)
    try:
        yield node
    finally:
        node.end()
        processes.kill_node(node_id(run_id, leader))
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
    """Starts an agent in a session of its own and returns it with this side of its control line.

    It has this process's environment, current directory, standard output and standard error.

    Args:
        root: where the package can be imported from: a folder, or a zip.
        inherit: sockets that the agent gets, by name; they stay open here.
        owner: pid of the process whose end ends a warm process.
        warmth: what is asked of a warm process; ``None``: the agent is started anew.
        task_cpus: CPUs of one task.
        wanted: whether the agent is still wanted, asked while a warm process imports.
        importing: is told the name of each module whose import by a warm process is waited for, "" once it has ended.
    """
    if warmth is not None:
        with suppress(OSError):  # a full disk, a /tmp that others tampered with: the run does not need this
            started = from_warm(root, inherit, owner, warmth, task_cpus, wanted, importing)
            if started is not None:
                return started
    return anew(root, inherit)
