"""Tell of libraries that coordinate by host, where several executors of a run share one."""

from __future__ import annotations

import sys
from typing import Any

from distributor.rank.imports import on_import
from distributor.values.placement import Node, Placement

#: Libraries whose processes with ``LOCAL_RANK`` 0 make shared memory for all others of the host.
_LIBRARIES = ("streaming",)


def warn(placement: Placement, node: Node, local_rank: int) -> None:
    """Print a warning if this process ever imports one of them, and it counts ranks of its own executor only."""
    neighbours = [other for other in placement.nodes if other.address == node.address]
    if node.by_host is None and len(neighbours) > 1 and local_rank == 0:
        for library in _LIBRARIES:
            on_import(library, lambda module: _print(module, len(neighbours)))


def _print(library: Any, executors: int) -> None:
    if not hasattr(library, "StreamingDataset"):  # another module of that name
        return
    print(
        f"[distributor] {library.__name__} coordinates by host, and {executors} executors of this run share this one, "
        'each with a LOCAL_RANK 0: pass local_ranks="host"',
        file=sys.stderr,
    )
