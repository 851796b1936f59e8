"""An agent as its owner sees it, and how one is started anew."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping

from distributor.machine import bootstrap, processes


class Agent:
    """A started agent. Its parent is this process, or a warm one.

    Args:
        pid: of the agent.
        descriptor: its process descriptor, -1 where the kernel has none; taken over.
        child: this process's own child, if it is that.
        note: what is to be told to the user.
    """

    def __init__(
        self, pid: int, descriptor: int, child: subprocess.Popen[bytes] | None = None, note: str | None = None
    ) -> None:
        self.pid = pid
        self.note = note
        self._descriptor = descriptor
        self._child = child

    def kill(self) -> None:
        """SIGKILLs it, if it has not ended."""
        if self._child is not None:
            self._child.kill()
        elif self._descriptor >= 0:
            processes.kill_by(self._descriptor, self.pid)

    def wait(self) -> None:
        """Waits until it has ended. Call it once, and nothing after it."""
        if self._child is not None:
            self._child.wait()
        while self._descriptor >= 0 and not processes.readable([self._descriptor], 3600.0):
            pass
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def anew(root: str, inherit: Mapping[str, socket.socket], note: str | None = None) -> tuple[Agent, socket.socket]:
    """Start an agent as a child of this process; the agent, and this side of its control line."""
    ours, theirs = socket.socketpair()
    with theirs:
        sockets = {"control": theirs, **inherit}
        named = [f"{name}={sock.fileno()}" for name, sock in sockets.items()]
        child = subprocess.Popen(
            bootstrap.command(root, "agent", str(os.getpid()), *named),
            stdin=subprocess.DEVNULL,
            pass_fds=[sock.fileno() for sock in sockets.values()],
            start_new_session=True,
            env=dict(os.environ),  # libraries in C set variables that Python does not know of (readline: LINES)
        )
    return Agent(child.pid, -1, child, note), ours
