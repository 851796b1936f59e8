"""What a run may leave behind, looked for from outside: processes, files, descriptors."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from distributor.channel.server import ChannelServer
from distributor.values import layout
from distributor.values.environment import NODE_ID
from distributor.values.plan import Endpoint

#: Seconds after which waiting for something that should be quick is a failure: generous, for busy machines.
DEADLINE = 240.0

T = TypeVar("T")


def processes(run_id: str = "") -> list[psutil.Process]:
    """Live processes of a run: its agents, launchers, ranks and whatever ranks started.

    By default, of any run that this process has started: other processes run tests beside it.
    """
    alive = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or not (run_id or _is_of_these_tests(process)):
                continue
            mark = _mark(process)
            agent = is_agent(process) and (not run_id or run_id in _agents_run(process))
            if agent or (mark and mark.startswith(run_id)):
                alive.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return alive


def _is_of_these_tests(process: psutil.Process) -> bool:
    return process.environ().get("TMPDIR") == os.environ["TMPDIR"]


def _mark(process: psutil.Process) -> str:
    """A process's node, "" for none; warm processes have a placeholder."""
    return process.environ().get(NODE_ID, "").strip("-")


def warm_processes(owner: int | None = None, temporary: str = "/") -> list[psutil.Process]:
    """Warm processes of an executor or driver; by default those of this process and all below it.

    Args:
        owner: pid of the executor or driver.
        temporary: the folder in which their folders lie.
    """
    this = psutil.Process()
    owners = {owner} if owner is not None else {this.pid, *(child.pid for child in this.children(recursive=True))}
    warm = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if part(process) == "warm" and int(process.cmdline()[7]) in owners:
                if Path(process.cmdline()[6]).is_relative_to(temporary):
                    warm.append(process)
    return warm


def agents_of(owner: int) -> list[psutil.Process]:
    """Agents that a Python worker or a driver has asked for."""
    agents = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if is_agent(process) and owner_of(process).pid == owner:
                agents.append(process)
    return agents


def below(owner: int) -> list[psutil.Process]:
    """All that runs for a driver in local mode: agents with what is below them, and warm processes."""
    agents = agents_of(owner)
    return [*agents, *(p for agent in agents for p in agent.children(recursive=True)), *warm_processes(owner)]


def owner_of(agent: psutil.Process) -> psutil.Process:
    """The Python worker or driver that asked for an agent, whose parent may be a warm process."""
    return psutil.Process(int(agent.cmdline()[5]))


def owners_of(agent: psutil.Process) -> list[psutil.Process]:
    """Who asked for an agent, and what that runs in."""
    owner = owner_of(agent)
    return [owner, *owner.parents()]


def part(process: psutil.Process) -> str:
    """The part of the package that a process runs, "" for other processes."""
    try:
        command = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
    return command[4] if len(command) > 4 and "distributor." in command[2] else ""


def is_agent(process: psutil.Process) -> bool:
    return part(process) == "agent"


def is_launcher(process: psutil.Process) -> bool:
    return part(process) == "launcher" and not is_fork(process)


def is_fork(process: psutil.Process) -> bool:
    """Whether it is a fork of its parent: ranks and spares have their launcher's command line."""
    parent = process.parent()
    return parent is not None and parent.cmdline() == process.cmdline()


def _agents_run(process: psutil.Process) -> str:
    """An agent's run, by its launcher's mark."""
    return " ".join(_mark(child) for child in process.children())


def folders() -> set[Path]:
    """Private folders of nodes that exist now."""
    paths = Path(tempfile.gettempdir()).glob(f"{layout.PREFIX}*")
    return {folder for folder in paths if not folder.name.startswith(f"{layout.PREFIX}warm-")}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], T], deadline: float = DEADLINE) -> T:
    """Waits for a condition with a deadline; returns what it returned."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline} s"
        time.sleep(0.02)  # a poll, with a deadline
    return value


def gone(run_id: str = "") -> None:
    """Asserts that soon no process of a run is left, nor a folder if it is one run."""
    end = time.monotonic() + DEADLINE
    while left := [*processes(run_id), *(path for path in folders() if run_id and run_id in path.name)]:
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.02)  # a poll, with a deadline


def endpoints(monkeypatch: pytest.MonkeyPatch) -> list[Endpoint]:
    """Where the drivers of runs come to listen, in the order in which they do."""
    seen: list[Endpoint] = []
    listen = ChannelServer.listen

    def remember(self: ChannelServer, *args: Any) -> Endpoint:
        seen.append(listen(self, *args))
        return seen[-1]

    monkeypatch.setattr(ChannelServer, "listen", remember)
    return seen


def started_by() -> int:
    """In a rank: the pid of the process that forked its agent, 0 if none did."""
    forked_by = psutil.Process().parents()[2]
    return forked_by.pid if "warm" in forked_by.cmdline()[4:5] else 0


def folder_of(pid: int) -> Path:
    return Path(psutil.Process(pid).cmdline()[6])
