"""If executors of a run share a host, warn about libraries that coordinate all processes of a host."""

from __future__ import annotations

import sys
from typing import Any

from distributor.machine.imports import on_import
from distributor.values.placement import Share

_LIBRARIES = ("streaming",)  # LOCAL_RANK 0 creates shared memory for all processes on its host


def warn(placement: Share, local_rank: int) -> None:
    """In local rank 0, warn if executors share this host and the rank imports a library that expects only one."""
    own_numbers = placement.node.by_host is None  # otherwise, local ranks count through a host
    if own_numbers and placement.beside > 1 and local_rank == 0:
        for library in _LIBRARIES:
            on_import(library, lambda module: _print(module, placement.beside))


def _print(library: Any, executors: int) -> None:
    if not hasattr(library, "StreamingDataset"):  # another module of that name
        return
    print(
        f"[distributor] {library.__name__} expects one LOCAL_RANK 0 on each host, but {executors} executors of this "
        'run share this host, and each has its own LOCAL_RANK 0: pass local_ranks="host"',
        file=sys.stderr,
    )
