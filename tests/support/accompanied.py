"""A launch path with companions, and what they run. Nodes import this module."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from distributor.errors import StartError
from distributor.launch.torchrun import Torchrun
from distributor.values.launch_path import BasePath
from distributor.values.plan import Call, Companion, Plan, Site


@dataclass(frozen=True)
class Accompanied(BasePath):
    """Torchrun's ranks beside a companion on some nodes.

    Args:
        function: what the companion runs, of this module.
        arguments: its arguments; it also gets the node's ``rank`` and ``ports``.
        nodes: node ranks of the nodes with a companion.
        ports: number of ports to reserve for each rank.
        once: whether only node 0 has a rank.
        restarts: whether the processes can be started again on the same nodes.
        first: what ranks call before their function.
        unplanned: node ranks of the nodes for which there is no plan.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[int, ...] = (0, 1)
    ports: int = 0  # type: ignore[misc]  # a number that tests choose
    once: bool = False  # type: ignore[misc]
    restarts: bool = False  # type: ignore[misc]
    first: Call | None = None
    unplanned: tuple[int, ...] = ()
    name: ClassVar[str] = "accompanied"
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def resolve(self, num_processes: int, use_gpu: bool) -> Accompanied:
        return self

    def plan(self, site: Site) -> Plan:
        plan, node = replace(Torchrun().plan(site), first=self.first), site.node.node_rank
        if node in self.unplanned:
            raise StartError(f"there is no plan for node {node}")
        if node not in self.nodes:
            return plan
        arguments = {**self.arguments, "node": node, "ports": site.node.ports, "attempt": site.attempt}
        companion = Companion("helper", "accompanied", self.function, arguments, {"HELPER": f"of node {node}"})
        return replace(plan, companions=(companion,))


def build(seconds: float, local_rank: int) -> None:
    """Takes as long as a compiler."""
    time.sleep(seconds)


def serve(folder: str, ready: Callable[[], None], node: int, ports: tuple[int, ...], **_: Any) -> None:
    """Notes that it is there, with a child, and stays."""
    time.sleep(0.2)  # ranks that did not wait would be there before
    child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    listeners = []
    for port in ports:
        listeners.append(socket.socket())
        listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listeners[-1].bind(("127.0.0.1", port))
        listeners[-1].listen()
    path = Path(folder, f"companion-{node}")
    path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid} {os.environ['HELPER']} {' '.join(map(str, ports))}")
    path.with_suffix(".new").rename(path)
    ready()
    time.sleep(600)


def fail(ready: Callable[[], None], when: str, how: int, path: str = "", attempts: int = 99, **site: Any) -> None:
    """Ends with an exit code or a signal: before it is ready, or once a file is there; not in later attempts."""
    print("careful", flush=True)
    print(f"port {len(site['ports'])} is taken", file=sys.stderr, flush=True)
    if when == "later" or site["attempt"] >= attempts:
        ready()
        while site["attempt"] >= attempts or not os.path.exists(path):
            time.sleep(0.02)
    if how < 0:
        os.kill(os.getpid(), -how)
    sys.exit(how)


def never_ready(**_: Any) -> None:
    time.sleep(600)


def stubborn(folder: str, ready: Callable[[], None], **more: Any) -> None:
    """Does not care for SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(folder, ready, **more)


def end(ready: Callable[[], None], path: str, **_: Any) -> None:
    """Ends with 0 once a file is there."""
    ready()
    while not os.path.exists(path):
        time.sleep(0.02)


def see(folder: str) -> list[str]:
    """The companions that were there when this rank began."""
    return sorted(path.name for path in Path(folder).iterdir())


def touch_and_wait(started: str, go: str) -> None:
    """Says that it runs, and stays; ``go`` is never there."""
    Path(started).touch()
    while not os.path.exists(go):
        time.sleep(0.02)
