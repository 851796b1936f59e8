"""The process of a companion, which ends with the agent at the latest."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys

from distributor.machine import processes
from distributor.values.plan import CompanionOrder


def main(path: str, agent_pid: str, ready: str) -> None:
    """Run a companion (entry point).

    The file ``path`` holds a pickled ``CompanionOrder``; readiness is reported on the pipe of the descriptor ``ready``.
    """
    processes.die_with_parent(int(agent_pid))
    pipe = int(ready)
    os.set_inheritable(pipe, False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with open(path, "rb") as file:
        order: CompanionOrder = pickle.load(file)
    sys.path[:] = order.sys_path
    sys.argv = [order.companion.name]
    function = getattr(importlib.import_module(order.companion.module), order.companion.function)
    function(**order.companion.arguments, ready=_Ready(pipe))


class _Ready:
    """Reports, on its first call, that the companion is ready."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe

    def __call__(self) -> None:
        if self._pipe is not None:
            os.write(self._pipe, b"1")
            os.close(self._pipe)
            self._pipe = None
