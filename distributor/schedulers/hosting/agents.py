"""Starts and controls an agent, from the Python worker of a Spark task or from the driver."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping

from distributor.machine import bootstrap, processes


class Agent:
    """A started agent: the child of a guard, which kills what the agent leaves behind, or a fork of a warm process."""

    def __init__(
        self, pid: int, descriptor: int, child: subprocess.Popen[bytes] | None = None, note: str | None = None
    ) -> None:
        self.pid = pid  # of the guard, if there is one
        self.note = note  # a warning for the user about the start
        self._descriptor = descriptor  # of a fork of a warm process, otherwise -1
        self._child = child  # the guard

    def kill(self) -> None:
        """Kill the agent with SIGKILL, unless it has ended."""
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
    """Start an agent, with a guard as its parent. Return it and the *control line*, this end of a socket pair.

    The sockets in ``inherit``, which the agent gets by name, stay open in this process.
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
