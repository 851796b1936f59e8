"""The one way to get an agent."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

from distributor.hosting.agents import Agent, anew
from distributor.hosting.warm import from_warm
from distributor.values.job import Warmth


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
