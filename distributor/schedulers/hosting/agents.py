"""The handle by which a process controls an agent that it has started, and a function that starts an agent.

The process that starts an agent is the Python worker of a Spark task or, in local mode, the driver. :func:`anew` starts
the agent as a new process. An agent can also be a fork of a warm process, which has imported torch in advance.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping

from distributor.machine import bootstrap, processes


class Agent:
    """A started agent, the process that runs one node.

    The agent's parent is either a guard or a warm process. A guard is a child of the process that has this object. If
    the agent is killed, its guard kills the processes that the agent has left. A warm process has imported torch in
    advance, and forks agents.

    Args:
        pid: process id of the agent, or of its guard if the agent has one.
        descriptor: process descriptor of an agent that a warm process forked, otherwise -1; this object closes the
            descriptor.
        child: the agent's guard, a child of this process; ``None`` if a warm process forked the agent.
        note: a warning for the user about the start of the agent, or ``None``.
    """

    def __init__(
        self, pid: int, descriptor: int, child: subprocess.Popen[bytes] | None = None, note: str | None = None
    ) -> None:
        self.pid = pid
        self.note = note
        self._descriptor = descriptor
        self._child = child

    def kill(self) -> None:
        """Kill the agent with SIGKILL, unless the agent has ended. If the agent has a guard, the guard kills it."""
        if self._child is not None:
            self._child.send_signal(bootstrap.END_SIGNAL)  # the guard kills the agent, and all that it leaves behind
        elif self._descriptor >= 0:
            processes.kill_by(self._descriptor, self.pid)

    def wait(self) -> None:
        """Wait until the agent has ended. Call this method once, and no other method afterwards."""
        if self._child is not None:
            self._child.wait()
        while self._descriptor >= 0 and not processes.readable([self._descriptor], 3600.0):
            pass
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def anew(root: str, inherit: Mapping[str, socket.socket], note: str | None = None) -> tuple[Agent, socket.socket]:
    """Start a guard as a child of this process. The guard starts an agent, and kills what this agent leaves behind.

    Return the agent (the process that runs one node) and the *control line* (this process's end of a socket pair, by
    which this process controls the agent).

    Args:
        root: the folder or zip from which the package can be imported.
        inherit: sockets that the agent gets, by name; they stay open in this process.
        note: a warning for the user about the start, kept in the attribute ``note`` of the returned agent.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        sockets = {"control": theirs, **inherit}
        named = [f"{name}={sock.fileno()}" for name, sock in sockets.items()]
        child = subprocess.Popen(
            bootstrap.command(root, "agent", str(os.getpid()), *named),
            stdin=subprocess.DEVNULL,
            pass_fds=[sock.fileno() for sock in sockets.values()],
            start_new_session=True,
            env=dict(os.environ),  # without variables that only C libraries have set (readline: LINES)
        )
    return Agent(child.pid, -1, child, note), ours
