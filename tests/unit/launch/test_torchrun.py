"""What the torchrun path gives each rank."""

import dataclasses

import pytest
from planned import job, placed

from distributor.launch.assign_ranks import with_port
from distributor.launch.torchrun import Torchrun
from distributor.values.environment import CONTRACT, sockets
from distributor.values.job import Function, Module, Script
from distributor.values.plan import NodeOrder, Site

SECRET = "hunter2"


def plan(request, node_rank=0, base_env=(), **kwargs):
    placement = placed(request, **kwargs)
    return Torchrun().plan(Site(request, placement.shares(whole=False)[node_rank], dict(base_env)))


def contract(**fields):
    return {
        "WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5000",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "run7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": f"error-{fields['LOCAL_RANK']}.json",
        **fields,
    }


NODE_0 = {"NODE_RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


NODE_1 = {"NODE_RANK": "1", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("node_rank", "expected"),
    [
        (
            0,
            (
                contract(**NODE_0, RANK="0", ROLE_RANK="0", LOCAL_RANK="0"),
                contract(**NODE_0, RANK="1", ROLE_RANK="1", LOCAL_RANK="1"),
            ),
        ),
        (1, (contract(**NODE_1, RANK="2", ROLE_RANK="2", LOCAL_RANK="0"),)),
    ],
)
def test_the_rank_contract(node_rank, expected):
    assert plan(job(), node_rank).rank_env == expected


def test_ranks_of_another_attempt_know_its_number_and_meet_elsewhere():
    request = job(max_restarts=3)
    placement = with_port(placed(request).shares(whole=False)[1], 6000)
    env = Torchrun().plan(Site(request, placement, {}, attempt=2)).rank_env[0]
    changed = {"MASTER_PORT": "6000", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert env == contract(**NODE_1, RANK="2", ROLE_RANK="2", LOCAL_RANK="0") | changed


def test_every_name_of_the_contract_is_set_and_no_other():
    made = plan(job())
    names = set(made.rank_env[0]) | set(made.node_env)
    others = {
        "OMP_NUM_THREADS",
        "GOMP_SPINCOUNT",
        "PYTHONUNBUFFERED",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }
    assert names == set(CONTRACT) | others


@pytest.mark.parametrize(("node_rank", "mark"), [(0, "run7.0"), (1, "run7.1")])
def test_node_environment_on_cpus(node_rank, mark):
    assert plan(job(), node_rank, cpus=4).node_env == {
        "DISTRIBUTOR_NODE_ID": mark,
        "OMP_NUM_THREADS": "4",
        "GOMP_SPINCOUNT": "10000",
        "PYTHONUNBUFFERED": None,  # removed
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "-1",
    }


@pytest.mark.parametrize("where", ["task", "job"])
@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_users_setting_for_waiting_threads_wins(where, name):
    said = {name: "5"}
    made = plan(job(env=said if where == "job" else {}), base_env=said if where == "task" else {})
    assert made.node_env.get("GOMP_SPINCOUNT") == ("5" if (where, name) == ("job", "GOMP_SPINCOUNT") else None)


@pytest.mark.parametrize("where", ["task", "job"])
def test_the_users_setting_for_gloos_connections_wins(where):
    said = {"TORCH_GLOO_LAZY_INIT": "0"}
    asked = job(33, env=said if where == "job" else {})
    made = plan(asked, base_env=said if where == "task" else {}, executors="a" * 33)
    assert "TORCH_DIST_INIT_BARRIER" not in made.node_env
    assert made.node_env.get("TORCH_GLOO_LAZY_INIT") == (None if where == "task" else "0")


@pytest.mark.parametrize("use_gpu", [False, True])
def test_only_ranks_on_cpus_keep_memory(use_gpu):
    made = plan(job(use_gpu=use_gpu), gpus=("0",) if use_gpu else (), executors="abc")
    assert made.keep_memory is not use_gpu


@pytest.mark.parametrize(("ranks", "use_gpu", "lazy"), [(33, False, True), (32, False, False), (33, True, False)])
def test_only_many_ranks_on_cpus_connect_when_they_first_talk(ranks, use_gpu, lazy):
    asked = job(ranks, use_gpu=use_gpu)
    made = plan(asked, gpus=("0",) if use_gpu else (), executors=[chr(ord("a") + rank) for rank in range(ranks)])
    assert ("TORCH_GLOO_LAZY_INIT" in made.node_env, "TORCH_DIST_INIT_BARRIER" in made.node_env) == (lazy, lazy)


def test_node_environment_on_gpus():
    request = job(2, use_gpu=True, ranks_per_task=2)
    made = plan(request, executors="a", gpus=("0", "1"), visible_devices="4,6")
    assert made.node_env["CUDA_VISIBLE_DEVICES"] == made.node_env["HIP_VISIBLE_DEVICES"] == "4,6"


@pytest.mark.parametrize(
    ("cpus", "ranks_per_task", "already", "expected"),
    [
        pytest.param(4, 1, None, "4", id="share"),
        pytest.param(8, 2, None, "4", id="share-of-a-task"),
        pytest.param(1, 4, None, "1", id="at-least-one"),
        pytest.param(4, 1, "4", "4", id="spark's-own-is-the-share"),
        pytest.param(8, 2, "8", "4", id="spark's-own-is-shared"),
        pytest.param(8, 2, "3", "3", id="user's-number"),
        pytest.param(4, 1, "16", "16", id="user's-larger-number"),
        pytest.param(7, 2, None, "3", id="share-does-not-divide"),
        pytest.param(7, 2, "7", "3", id="spark's-own-does-not-divide"),
        pytest.param(7, 2, "6", "6", id="user's-multiple-of-the-share"),
        pytest.param(2, 4, "2", "1", id="spark's-own-is-less-than-the-ranks"),
    ],
)
def test_omp_threads(cpus, ranks_per_task, already, expected):
    request = job(ranks_per_task, ranks_per_task=ranks_per_task, spark_cpus=cpus)
    base = {} if already is None else {"OMP_NUM_THREADS": already}
    assert plan(request, base_env=base, executors="a", cpus=cpus).node_env["OMP_NUM_THREADS"] == expected


def test_a_number_of_the_users_that_equals_the_cpus_is_not_shared():
    request = job(2, ranks_per_task=2)  # without spark_cpus, Spark sets nothing
    node = plan(request, base_env={"OMP_NUM_THREADS": "4"}, executors="a", cpus=4)
    assert node.node_env["OMP_NUM_THREADS"] == "4"


def test_cpus_of_a_profile_are_threads_though_spark_says_otherwise():
    """Spark sets OMP_NUM_THREADS to spark.task.cpus also for tasks that have more by their profile."""
    request = job(2, spark_cpus=1)
    assert plan(request, base_env={"OMP_NUM_THREADS": "1"}, executors="ab", cpus=4).node_env["OMP_NUM_THREADS"] == "4"
    assert plan(request, base_env={"OMP_NUM_THREADS": "2"}, executors="ab", cpus=4).node_env["OMP_NUM_THREADS"] == "2"


def test_the_interface_is_a_default():
    request = job()
    placement = placed(request)
    made = Torchrun().plan(Site(request, placement.shares(whole=False)[0], {}, sockets({}, "eth1")))
    assert made.node_env["GLOO_SOCKET_IFNAME"] == made.node_env["TP_SOCKET_IFNAME"] == "eth1"
    assert made.node_env["NCCL_SOCKET_IFNAME"] == "=eth1"  # "eth1" would mean eth10, too


@pytest.mark.parametrize(
    ("name", "value", "base"),
    [
        ("OMP_NUM_THREADS", "2", "9"),
        ("GLOO_SOCKET_IFNAME", "mine", "theirs"),
        ("CUDA_VISIBLE_DEVICES", "3", "0,1"),
        ("PYTHONUNBUFFERED", "1", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "0"),
        ("MY_OWN", "x", "y"),
    ],
)
def test_the_users_variables_win(name, value, base):
    assert plan(job(env={name: value}), base_env={name: base}).node_env[name] == value


def rank_0_sees(made, base_env, name):
    """A variable as the layers of a rank's environment make it."""
    merged = {**base_env, **made.node_env, **made.rank_env[0]}
    return merged[name]


@pytest.mark.parametrize(
    ("env", "base_env", "expected"),
    [
        ({}, {}, "1"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, {}, "3"),
        ({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3"),
    ],
)
def test_nccl_error_handling_is_a_default(env, base_env, expected):
    made = plan(job(env=env), base_env=base_env)
    assert rank_0_sees(made, base_env, "TORCH_NCCL_ASYNC_ERROR_HANDLING") == expected


@pytest.mark.parametrize(
    "target",
    [Function("train", b"hunter2"), Script("train.py", b"hunter2"), Module("pkg.train")],
    ids=lambda target: type(target).__name__,
)
def test_env_values_and_payloads_are_not_shown(target):
    request = job(env={"TOKEN": SECRET, "TORCH_NCCL_ASYNC_ERROR_HANDLING": SECRET}, target=target)
    placement = placed(request).shares(whole=False)[0]
    made = plan(request)
    order = NodeOrder(
        "run7", made, placement, 1.0, 1.0, None, 3, "folder", None, (), False, "fork", "root", request.env
    )
    assert made.node_env["TOKEN"] == SECRET
    for shown in (request, made, order, dataclasses.replace(request)):
        assert SECRET not in repr(shown)


def test_planning_has_no_effect_on_what_it_is_given():
    env, base = {"A": "1"}, {"B": "2"}
    request = job(env=env)
    assert plan(request, base_env=base) == plan(request, base_env=base)
    assert (env, base) == ({"A": "1"}, {"B": "2"})
