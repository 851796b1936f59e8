"""Launch paths: how a node's ranks are started. Each is a small class with one pure method, ``plan``.

To add one, write its module here and name it in :data:`PATHS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from distributor.launch.deepspeed import Deepspeed
from distributor.launch.torchrun import Torchrun
from distributor.values.job import Job
from distributor.values.placement import Node, Placement
from distributor.values.plan import Plan


class LaunchPath(Protocol):
    """Decides what one node does; has no effects."""

    def plan(
        self,
        job: Job,
        placement: Placement,
        node: Node,
        base_env: Mapping[str, str],
        sockets: Mapping[str, str],
        folder: str,
    ) -> Plan: ...


PATHS: dict[str, LaunchPath] = {"torchrun": Torchrun(), "deepspeed": Deepspeed()}
