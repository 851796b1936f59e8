"""The launcher as its agent sees it: a process started anew, or a process forked early that waits for its order."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, Protocol

from distributor.machine import bootstrap, processes
from distributor.values import layout
from distributor.values.plan import NodeOrder


class Launcher(Protocol):
    """The interface through which an agent controls its launcher."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """The launcher's exit code once it has ended. Negative for a signal."""

    def start(self, order: NodeOrder) -> int:
        """Make the launcher start the ranks. Return a pipe of its events, which ends when the launcher ends."""

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> object:
        """Block until the launcher has ended."""


class SpawnedLauncher:
    """A launcher that is started once its order is known. It imports torch, which takes seconds."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    def start(self, order: NodeOrder) -> int:
        events, event_fd = os.pipe()
        try:
            path = _write(replace(order, event_fd=event_fd))
            with open(layout.launcher_log(order.folder), "wb") as log:
                self._process = subprocess.Popen(
                    bootstrap.command(order.root, "launcher", path, str(os.getpid())),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(order.environ),
                    pass_fds=[fd for fd in (order.store_fd, event_fd) if fd is not None],
                )
        finally:
            os.close(event_fd)
        return events

    def send_signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> object:
        return self._process.wait() if self._process is not None else None


class ForkedLauncher:
    """A launcher that is forked in the constructor. The process must have imported torch, and have no threads.

    Args:
        sockets: the sockets that the agent has inherited. The launcher keeps only ``"store"``.
        owner: pid of the process that asked for the agent.
    """

    def __init__(self, sockets: Mapping[str, socket.socket], owner: int) -> None:
        self._returncode: int | None = None
        self._events, self._event_fd = os.pipe()
        waiting, self._orders = os.pipe()
        agent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in (self._events, self._orders):
                os.close(descriptor)
            for name, inherited in sockets.items():
                if name != "store":
                    inherited.close()
            self._become_launcher(waiting, agent, owner)
        os.close(waiting)

    @property
    def returncode(self) -> int | None:
        return self._returncode

    def start(self, order: NodeOrder) -> int:
        path = _write(replace(order, event_fd=self._event_fd))
        os.close(self._event_fd)
        with suppress(BrokenPipeError):  # the launcher was killed, so its events end at once
            os.write(self._orders, path.encode())
        os.close(self._orders)
        return self._events

    def send_signal(self, number: int) -> None:
        if self._returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> object:
        if self._returncode is None:
            self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._returncode

    def _become_launcher(self, waiting: int, agent: int, owner: int) -> NoReturn:
        """Wait for the order in the fork, then run the ranks. There is no order if the agent ends first."""
        try:
            processes.die_with_parent(agent)
            with open(waiting, "rb") as orders:
                path = orders.read().decode()
            if path:
                from distributor.node import launcher

                launcher.become(path, agent, owner)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)


def _write(order: NodeOrder) -> str:
    """Write the order into a file, because functions can be large, and return its path."""
    path = str(layout.order(order.folder))
    with open(path, "wb") as file:
        pickle.dump(order, file)
    return path
