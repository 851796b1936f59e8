"""Tell JAX about the other ranks, with a ``ClusterEnv`` class that ``jax.distributed.initialize()`` asks first."""

from __future__ import annotations

import os
from functools import partial
from types import ModuleType
from typing import Any

from distributor.machine.imports import on_import


def register(coordinator: str, address: str, world_size: int, first_rank: int, use_gpu: bool, local_rank: int) -> None:
    """Tell JAX about this run once it is imported. Collectives on CPUs listen at ``address``, the node's own."""
    place = {
        "coordinator": coordinator,
        "world_size": world_size,
        "rank": first_rank + local_rank,
        "device": local_rank if use_gpu else None,
    }
    on_import("jax._src.clusters.cluster", partial(_add_environment, place=place))
    on_import("jax._src.xla_bridge", partial(_listen_on, address=address))


def _add_environment(module: ModuleType, place: dict[str, Any]) -> None:
    # JAX uses the first subclass whose ``is_env_present`` returns ``True``: ``jax/_src/clusters/cluster.py``,
    # https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html
    class Placed(module.ClusterEnv):  # type: ignore[name-defined, misc]  # JAX need not be installed here
        name = "distributor"

        @classmethod
        def is_env_present(cls) -> bool:
            return True

        @classmethod
        def get_coordinator_address(cls, *_: Any, **__: Any) -> str:
            # By default, it listens on all addresses. If the script names a coordinator, JAX does not call this.
            os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", place["coordinator"])
            return str(place["coordinator"])

        @classmethod
        def get_process_count(cls) -> int:
            return int(place["world_size"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(place["rank"])

        @classmethod
        def get_local_process_id(cls) -> int | None:
            device: int | None = place["device"]
            return device

    known = module.ClusterEnv._cluster_types
    known.insert(0, known.pop())


def _listen_on(module: ModuleType, address: str) -> None:
    """Make collectives on CPUs listen on the node's address, not on what the host's name resolves to."""
    for where in (getattr(module, "_jax", None), getattr(getattr(module, "_jax", None), "collectives", None)):
        make = getattr(where, "make_gloo_tcp_collectives", None)
        if make is not None:
            where.make_gloo_tcp_collectives = partial(make, hostname=address)  # type: ignore[union-attr]
