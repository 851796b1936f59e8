"""Let a rank join one process group of all ranks after another, in one function or script."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import wraps
from typing import Any

from distributor.machine.imports import on_import


def watch(world_size: int) -> None:
    """From now on, give each process group of all ranks keys of its own in torch's store."""
    on_import("torch.distributed.distributed_c10d", lambda module: _separate(module, world_size))


# Torch names groups by a count, and begins their keys with the name. ``destroy_process_group`` sets the count back, so
# the next group has the same keys, and finds the addresses of the previous one in the launcher's store (pytorch issues
# 55967 and 74666). This wraps what only ``init_process_group`` calls: code that asks ``torch.distributed.rendezvous``
# for a store, such as RPC, may do so on some ranks only. Groups of some ranks (``rank=``, ``world_size=``) are not
# counted, because ranks may have been in different numbers of them.
def _separate(module: Any, world_size: int) -> None:
    rendezvous, numbers = module.rendezvous, itertools.count()

    def with_own_keys(found: tuple[Any, int, int]) -> tuple[Any, int, int]:
        store, rank, size = found
        name = str(next(numbers)) if size == world_size else f"of {size} ranks"
        return store if name == "0" else module.PrefixStore(f"distributor/group {name}", store), rank, size

    @wraps(rendezvous)
    def separate(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        found = rendezvous(url, *args, **kwargs)
        return map(with_own_keys, found) if url.startswith("env://") else found  # stores of the user's stay as they are

    module.rendezvous = separate
