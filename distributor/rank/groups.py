"""Let a rank join one process group of all ranks after another, and refuse addresses at which the ranks do not meet."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from functools import wraps
from typing import Any
from urllib.parse import urlsplit

from distributor.errors import ConfigurationError
from distributor.machine.imports import on_import
from distributor.text import wording

_PROBE = 2.0  # seconds to wait for an answer at an address that is not the run's

Address = tuple[str, str]  # host and port


def watch(world_size: int) -> None:
    """From now on, give each process group of all ranks keys of its own in torch's store."""
    meets_at = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    on_import("torch.distributed.distributed_c10d", lambda module: _separate(module, world_size, meets_at))


def elsewhere(url: str, environ: Mapping[str, str], meets_at: Address) -> Address | None:
    """Return where a process group would meet if that is not where the run's ranks meet; else ``None``.

    >>> elsewhere("tcp://localhost:23456", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, ("10.0.0.1", "4711"))
    ('localhost', '23456')
    """
    parts = urlsplit(url)
    if parts.scheme not in ("env", "tcp") or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None  # torch itself then starts a store there
    named = (parts.hostname or "", str(parts.port))
    asked = named if parts.scheme == "tcp" else (environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""))
    return None if asked == meets_at else asked


def _check_address(url: str, meets_at: Address) -> None:
    """ConfigurationError if nobody listens where the code wants to meet: torch would wait there for a minute."""
    asked = elsewhere(url, os.environ, meets_at)
    if asked is None:
        return
    try:
        socket.create_connection((asked[0], int(asked[1])), _PROBE).close()
    except (OSError, ValueError) as error:
        text = f"init_method={url!r}" if url.startswith("tcp:") else "MASTER_ADDR or MASTER_PORT"
        raise ConfigurationError(
            f"this code changes the run's address: the ranks meet at {wording.address(*meets_at)}, but {text} names "
            f"{wording.address(*asked)}, where nobody listens ({error}). Leave out the lines that set MASTER_ADDR, "
            "MASTER_PORT or init_method: init_process_group() finds the other ranks without them"
        ) from None


# Torch names groups by a count, and begins their keys with the name. ``destroy_process_group`` sets the count back, so
# the next group has the same keys, and finds the addresses of the previous one in the launcher's store (pytorch issues
# 55967 and 74666). This wraps what only ``init_process_group`` calls: code that asks ``torch.distributed.rendezvous``
# for a store, such as RPC, may do so on some ranks only. Groups of some ranks (``rank=``, ``world_size=``) are not
# counted, because ranks may have been in different numbers of them.
def _separate(module: Any, world_size: int, meets_at: Address) -> None:
    rendezvous, numbers = module.rendezvous, itertools.count()

    def with_own_keys(joined: tuple[Any, int, int]) -> tuple[Any, int, int]:
        store, rank, size = joined
        name = str(next(numbers)) if size == world_size else f"of {size} ranks"
        return store if name == "0" else module.PrefixStore(f"distributor/group {name}", store), rank, size

    @wraps(rendezvous)
    def separate(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        _check_address(url, meets_at)
        joined = rendezvous(url, *args, **kwargs)
        return map(with_own_keys, joined) if url.startswith("env://") else joined  # users' own stores stay as they are

    module.rendezvous = separate
