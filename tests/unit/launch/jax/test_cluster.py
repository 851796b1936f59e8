"""What JAX asks about the other ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from distributor.launch.jax import cluster


def test_jaxs_coordinator_listens_on_node_0s_address_unless_the_script_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ClusterEnv:
        """JAX's, as far as it is used: the real one registers its subclasses too."""

        _cluster_types: list[Any] = ["Slurm"]

        def __init_subclass__(cls) -> None:
            ClusterEnv._cluster_types.append(cls)

    module: Any = SimpleNamespace(ClusterEnv=ClusterEnv)
    cluster._add_environment(module, {"coordinator": "10.0.0.1:6000", "world_size": 3, "rank": 2, "device": None})
    placed = ClusterEnv._cluster_types[0]
    for given, expected in (({}, "10.0.0.1:6000"), ({"JAX_COORDINATOR_BIND_ADDRESS": "x:1"}, "x:1")):
        monkeypatch.setattr(os, "environ", dict(given))
        assert (placed.get_coordinator_address(), placed.get_process_id()) == ("10.0.0.1:6000", 2)
        assert os.environ["JAX_COORDINATOR_BIND_ADDRESS"] == expected
