"""What paths other than torchrun's give ranks."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import make_job

from distributor.errors import ConfigurationError
from distributor.launch import Accelerate, DeepSpeed, Jax, Mpi, MpiEnv, Ray, TensorFlow
from distributor.launch.assign_ranks import place
from distributor.launch.jax import cluster
from distributor.launch.torchrun import Torchrun
from distributor.values.job import Function, Job
from distributor.values.outcome import Failure
from distributor.values.placement import NodeFacts, Placement
from distributor.values.plan import Plan, Site

TMP = "/tmp/distributor-run7-x"


def plans(launch: Any, executors: str = "aba", folder: str = TMP, **options: Any) -> list[Plan]:
    """The plans of all nodes, which know no more than the path asks for; one task for each letter."""
    request = job(launch, len(executors), **options)
    who = placed(request, executors)
    shares = who.shares(whole=launch.all_nodes)
    return [launch.plan(Site(request, share, {}, folder=folder)) for share in shares]


def job(launch: Any, num_processes: int, **options: Any) -> Job:
    return make_job("run7", num_processes, Function("train", b""), launch=launch, **options)


def placed(request: Job, executors: str) -> Placement:
    each = request.launch.ports
    facts = [
        NodeFacts(
            number,
            name,
            f"host-{name}",
            f"10.0.0.{ord(name) - 96}",
            5000 + number,
            gpus=(str(number),) if request.resources.use_gpu else (),
            ports=tuple(range(6000 + 10 * number, 6000 + 10 * number + each)),
        )
        for number, name in enumerate(executors)
    ]
    return place(facts, request)


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


def test_jax_uses_cpus_where_there_are_no_gpus_and_leaves_sigterm_alone() -> None:
    assert Jax().env(False) == {"JAX_ENABLE_PREEMPTION_SERVICE": "false", "JAX_PLATFORMS": "cpu"}
    assert Jax().env(True) == {"JAX_ENABLE_PREEMPTION_SERVICE": "false"}


def test_the_mpi_environment_counts_as_torchruns() -> None:
    first, second = plans(MpiEnv())
    assert {name: value for name, value in first.rank_env[1].items() if name.startswith(("OMPI", "AZ_"))} == {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "AZ_BATCH_MASTER_NODE": "10.0.0.1:5000",
        "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.1",
    }
    assert second.rank_env[0]["OMPI_COMM_WORLD_RANK"] == "2"


def test_ranks_of_mpi_get_their_places_from_the_companion_of_their_node() -> None:
    first, second = plans(Mpi().resolve(3, False))
    (one,), (other,) = first.companions, second.companions
    assert one.arguments == {
        **{"node": 0, "sizes": (2, 1), "hosts": ("host-a", "host-b"), "head": ("10.0.0.1", 6000)},
        **{"folder": TMP, "kind": None},
    }
    assert other.arguments["node"] == 1
    assert first.first is not None and first.last is not None
    lines = one.environment["DISTRIBUTOR_MPI_LINES"].split()  # of each rank, the node's
    assert lines[0] == lines[1] != lines[2]
    assert lines == other.environment["DISTRIBUTOR_MPI_LINES"].split()
    assert first.first.arguments == {"line": lines[0], "world_size": 3, "beside": 2}
    assert one.environment["DISTRIBUTOR_MPI_KEY"] == other.environment["DISTRIBUTOR_MPI_KEY"]
    (another,) = plans(Mpi().resolve(3, False), "a")[0].companions
    assert not {*one.environment.values()} & {*another.environment.values()}
    assert not any(secret in repr(first.companions) for secret in one.environment.values())


def test_the_mpi_environment_writes_addresses_as_urls_do() -> None:
    request = job(MpiEnv(), 1)
    who = place([NodeFacts(0, "a", "host-a", "fd00::1", 5000)], request)
    (env,) = MpiEnv().plan(Site(request, who.shares(whole=False)[0], {}, folder=TMP)).rank_env
    assert (env["AZ_BATCH_MASTER_NODE"], env["AZ_BATCHAI_MPI_MASTER_NODE"]) == ("[fd00::1]:5000", "fd00::1")


def tf_config(plan: Plan, local_rank: int) -> Any:
    return json.loads(plan.rank_env[local_rank]["TF_CONFIG"])


def test_tensorflows_workers() -> None:
    first, second = plans(TensorFlow())
    workers = ["10.0.0.1:6000", "10.0.0.1:6020", "10.0.0.2:6010"]
    assert tf_config(first, 1) == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}
    assert tf_config(second, 0)["task"] == {"type": "worker", "index": 2}
    assert first.serving == ()


def test_tensorflows_parameter_servers_serve_and_the_evaluator_is_no_part_of_the_cluster() -> None:
    first, second = plans(TensorFlow(1, True), "abab")
    assert tf_config(first, 0)["cluster"] == {
        "chief": ["10.0.0.1:6000"],
        "worker": ["10.0.0.1:6020"],
        "ps": ["10.0.0.2:6010"],
    }
    assert [tf_config(second, local_rank)["task"]["type"] for local_rank in (0, 1)] == ["ps", "evaluator"]
    assert first.serving == second.serving == (1, 2)
    assert (first.serving_here, second.serving_here) == ({1}, {0})


def test_each_process_of_tensorflow_sees_its_own_gpus() -> None:
    first, _ = plans(TensorFlow(), use_gpu=True)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in first.rank_env] == ["0", "2"]


@pytest.mark.parametrize(
    ("path", "processes", "told"),
    [
        (TensorFlow(-1), 2, "parameter_servers must be a whole number, at least 0, not -1"),
        (TensorFlow(True), 2, "parameter_servers must be a whole number, at least 0, not True"),
        (TensorFlow(0, "yes"), 2, "evaluator must be True or False, not 'yes'"),  # type: ignore[arg-type]
        (TensorFlow(2), 3, "num_processes=3 is too few for a chief, a worker, 2 parameter servers: it counts all"),
        (TensorFlow(0, True), 1, "num_processes=1 is too few for a worker, an evaluator: .* raise it to 2 or more"),
        (Mpi("lam"), 2, "implementation must be 'mpich' or 'openmpi', not 'lam'"),
        (Ray("x"), 2, "object_store_memory must be a size such as '8g'"),
        (Ray("10m"), 2, r"object_store_memory must be at least 78,643,200 bytes \(Ray's minimum\), not '10m'"),
    ],
)
def test_what_a_path_refuses(path: Any, processes: int, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        path.resolve(processes, False)


def test_ray_runs_once_and_each_node_offers_its_slots() -> None:
    head, other = plans(Ray(1 << 30, secret="s3cret"))
    assert [len(head.rank_env), len(other.rank_env)] == [1, 0]
    assert [node.slots for node in placed(job(Ray(), 3), "aba").nodes] == [2, 1]
    assert head.rank_env[0]["RAY_ADDRESS"] == "10.0.0.1:6000"
    assert head.rank_env[0]["WORLD_SIZE"] == "1"
    (ours,), (theirs,) = head.companions, other.companions
    assert {"--head", "--port=6000", "--num-cpus=2", "--ray-client-server-port=6001"} <= {*ours.arguments["arguments"]}
    assert {"--address=10.0.0.1:6000", "--num-cpus=1", "--object-store-memory=1073741824"} <= {
        *theirs.arguments["arguments"]
    }
    assert theirs.arguments["head"] == ("10.0.0.1", 6000)
    assert ours.arguments["head"] is None


def test_how_rays_processes_are_started() -> None:
    head, other = (plan.companions[0] for plan in plans(Ray(secret="s"), use_gpu=True))
    assert {"--include-dashboard=false", "--disable-usage-stats"} <= {*head.arguments["arguments"]}
    assert {"--node-ip-address=10.0.0.1", "--num-gpus=2"} <= {*head.arguments["arguments"]}
    assert {"--node-ip-address=10.0.0.2", "--num-gpus=1"} <= {*other.arguments["arguments"]}
    assert head.arguments["use_gpu"] is other.arguments["use_gpu"] is True
    for plan in plans(Ray(secret="s")):
        (companion,) = plan.companions
        assert companion.arguments["use_gpu"] is False
        assert "--num-gpus=0" in companion.arguments["arguments"]
        assert companion.environment["RAY_AUTH_MODE"] == "token"
        assert companion.environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"
        given = {**plan.node_env, **companion.environment}
        assert not [name for name in given if name.startswith("TORCHELASTIC")]


def test_only_the_path_of_mpis_variables_sets_them() -> None:
    """Libraries that find Open MPI's variables take them for a start by mpirun."""
    for plan in plans(Torchrun()):
        for env in (plan.node_env, *plan.rank_env):
            assert not [name for name in env if name.startswith(("OMPI_", "PMI", "AZ_", "MPI"))]


def test_rays_token_is_the_runs_own_and_is_not_shown() -> None:
    one, other = (plans(Ray(secret=secret), "ab") for secret in ("hunter2", "b"))
    tokens = {plan.companions[0].environment["RAY_AUTH_TOKEN"] for plan in [*one, *other]}
    assert len(tokens) == 2
    assert one[0].rank_env[0]["RAY_AUTH_TOKEN"] in tokens
    assert not any(token in repr([*one, Ray(secret="hunter2")]) for token in (*tokens, "hunter2"))


@pytest.mark.parametrize(
    ("folder", "expected", "left"),
    [(TMP, f"{TMP}/ray", ()), ("/tmp/" + "x" * 60, "/tmp/dr-run7-bb0308fd", ("/tmp/dr-run7-bb0308fd",))],
)
def test_the_names_of_rays_sockets_are_short(folder: str, expected: str, left: tuple[str, ...]) -> None:
    (plan,) = plans(Ray(secret="s"), "a", folder)
    assert f"--temp-dir={expected}" in plan.companions[0].arguments["arguments"]
    assert plan.elsewhere == left


def test_rays_folder_has_another_name_in_each_run() -> None:
    """What others can guess they can make before."""
    assert len({plan.elsewhere for each in "ab" for plan in plans(Ray(secret=each), "ab", "/tmp/" + "x" * 60)}) == 2


def test_ray_counts_the_cpus_of_tasks_that_have_several_ranks() -> None:
    launch = Ray(secret="s")
    request = job(launch, 4, ranks_per_task=2)
    facts = [NodeFacts(number, "a", "host-a", "10.0.0.1", 5000, cpus=3, ports=(1, 2)) for number in range(2)]
    who = place(facts, request)
    (plan,) = (launch.plan(Site(request, share, {}, folder=TMP)) for share in who.shares(whole=False))
    assert "--num-cpus=6" in plan.companions[0].arguments["arguments"]


@pytest.mark.parametrize(
    ("launch", "failure", "told"),
    [
        (Jax(), {"message": "RuntimeError: jax.distributed.initialize() must be called before any"}, "initialize() fi"),
        (Jax(), {"message": "ValueError: x"}, ""),
        (MpiEnv(), {"message": "exited with code 1", "log_tail": "error in MPI_Init"}, "starts no MPI"),
        (MpiEnv(), {"message": "ValueError: x"}, ""),
        (Mpi(), {"message": "libmpi.so.12: cannot open shared object", "traceback": "mpi4py"}, "mpich mpi4py"),
        (Mpi(), {"message": "cannot open shared object", "traceback": "x"}, ""),
        (TensorFlow(), {"message": "x", "traceback": '"/lib/keras/src/trainer.py"'}, "TF_USE_LEGACY_KERAS"),
        (TensorFlow(), {"message": "x", "traceback": '"/lib/tf_keras/src/trainer.py"'}, ""),
        (Ray(), {"message": "x"}, ""),
    ],
)
def test_advice(launch: Any, failure: dict[str, str], told: str) -> None:
    advice = launch.advise(Failure(0, 0, "host", "ValueError", **failure), job(launch, 2))
    assert told in advice and bool(told) == bool(advice)


def test_which_paths_start_again_on_the_same_nodes() -> None:
    """The others get a new job: their programs on other nodes know the first processes only."""
    again = {Torchrun, DeepSpeed, Accelerate}
    assert {path for path in (*again, Ray, Mpi, MpiEnv, TensorFlow, Jax) if path.restarts} == again
