"""What ranks of JAX learn of each other, and its variables."""

from __future__ import annotations

from planned import plans

from distributor.launch import Jax


def test_jax_learns_of_the_coordinator_and_of_all_ranks() -> None:
    first, second = plans(Jax())
    assert "JAX_COORDINATOR_BIND_ADDRESS" not in {**second.node_env, **second.rank_env[0]}  # a script may name its own
    assert second.first is not None and first.first is not None
    assert second.first.arguments == {
        "coordinator": "10.0.0.1:6000",
        "address": "10.0.0.2",
        "world_size": 3,
        "first_rank": 2,
        "use_gpu": False,
    }
    assert first.first.arguments["first_rank"] == 0


def test_jax_uses_cpus_where_there_are_no_gpus_and_leaves_sigterm_alone() -> None:
    assert Jax().env(False) == {"JAX_ENABLE_PREEMPTION_SERVICE": "false", "JAX_PLATFORMS": "cpu"}
    assert Jax().env(True) == {"JAX_ENABLE_PREEMPTION_SERVICE": "false"}
