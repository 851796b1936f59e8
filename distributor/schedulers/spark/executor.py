"""Finds the executor that a Python worker belongs to."""

from __future__ import annotations

import os
from contextlib import suppress

from distributor.machine.processes import stat


def executor_of_this() -> int:
    """Return the pid of this worker's Spark executor: the worker's nearest ancestor that is a JVM, else its parent."""
    pid = os.getpid()
    while (fields := stat(pid)) is not None and int(fields[1]) > 1:
        pid = int(fields[1])
        with suppress(OSError), open(f"/proc/{pid}/comm", errors="replace") as name:
            if name.read().startswith("java"):
                return pid
    return os.getppid()


def executor_host(pid: int) -> str | None:
    """Return the host name that a Spark executor was started with; ``None`` if the process is not an executor."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/cmdline") as line:
        arguments = line.read().split("\0")
        if any(argument.endswith("ExecutorBackend") for argument in arguments):
            return arguments[arguments.index("--hostname") + 1]
    return None
