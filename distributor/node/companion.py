"""The process of a companion (a helper, such as a Ray head, that must run beside the ranks).

The agent starts this process. A file from the agent names the function that the process must call, such as one that
runs a Ray head. The process ends at the latest when the agent ends.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys

from distributor.machine import processes
from distributor.values.plan import CompanionOrder


def main(path: str, agent_pid: str, ready: str) -> None:
    """Run a companion, such as a Ray head, in this process, beside the ranks (entry point).

    Args:
        path: path of a file with a pickled ``CompanionOrder``, in which the agent names the function to call.
        agent_pid: pid of the agent. This process ends when the agent ends.
        ready: descriptor of the pipe on which this process reports that it is ready.
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
    """A function that reports, on its first call, that the companion (this process) is ready."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe

    def __call__(self) -> None:
        if self._pipe is not None:
            os.write(self._pipe, b"1")
            os.close(self._pipe)
            self._pipe = None
