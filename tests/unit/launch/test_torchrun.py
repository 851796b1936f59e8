"""What the torchrun path gives each rank."""

import dataclasses
import os
from dataclasses import replace

import pytest
from jobs import make_job

from distributor.launch.assign_ranks import place, with_port
from distributor.launch.deepspeed.config import ResolvedConfig
from distributor.launch.deepspeed.path import CONFIG_PATH, DeepSpeed
from distributor.launch.torchrun import Torchrun
from distributor.values.environment import CONTRACT, nccl_knows_better, sockets
from distributor.values.job import Function, Module, Script
from distributor.values.outcome import Failure
from distributor.values.placement import NodeFacts
from distributor.values.plan import NodeOrder, Site

SECRET = "hunter2"


def job(num_processes=3, **fields):
    return make_job(
        **{
            "run_id": "run7",
            "num_processes": num_processes,
            "target": Function("train", b""),
            "use_gpu": False,
            "launch": Torchrun(),
            **fields,
        }
    )


def placed(request, executors="aba", cpus=1, **common):
    facts = [
        NodeFacts(partition, name, f"host-{name}", f"10.0.0.{ord(name) - 96}", 5000 + partition, cpus=cpus, **common)
        for partition, name in enumerate(executors)
    ]
    return place(facts, request)


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
        "HIP_VISIBLE_DEVICES": "",
    }


@pytest.mark.parametrize("where", ["task", "job"])
@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_says_of_waiting_threads_holds(where, name):
    said = {name: "5"}
    made = plan(job(env=said if where == "job" else {}), base_env=said if where == "task" else {})
    assert made.node_env.get("GOMP_SPINCOUNT") == ("5" if (where, name) == ("job", "GOMP_SPINCOUNT") else None)


@pytest.mark.parametrize("where", ["task", "job"])
def test_what_the_user_says_of_gloos_connections_holds(where):
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
    request = job(ranks_per_task, ranks_per_task=ranks_per_task)
    base = {} if already is None else {"OMP_NUM_THREADS": already}
    assert plan(request, base_env=base, executors="a", cpus=cpus).node_env["OMP_NUM_THREADS"] == expected


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
    ("environ", "interface", "leave_nccl", "names"),
    [
        ({}, "eth1", False, {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}),
        ({}, "eth1", True, {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}),
        ({"GLOO_SOCKET_IFNAME": "ens5"}, "eth1", False, {"NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}),
        ({}, None, False, set()),
    ],
)
def test_what_is_said_of_interfaces(environ, interface, leave_nccl, names):
    assert set(sockets(environ, interface, leave_nccl)) == names


@pytest.mark.parametrize(
    ("settings", "knows"), [("NCCL_SOCKET_IFNAME=bond0\n", True), ("NCCL_DEBUG=WARN\n", False), (None, False)]
)
def test_nccls_own_file_is_left_to_speak(settings, knows, tmp_path):
    """Variables of the environment would win over it."""
    path = tmp_path / "nccl.conf"
    if settings is not None:
        path.write_text(settings)
    assert nccl_knows_better({"NCCL_CONF_FILE": str(path)}) == knows


@pytest.mark.parametrize(("interfaces", "knows"), [(["lo", "eth0"], False), (["lo", "eth0", "ib0"], True)])
def test_nccl_chooses_where_there_is_ip_over_infiniband(interfaces, knows, monkeypatch):
    monkeypatch.setattr("os.listdir", lambda path: {"/sys/class/net": interfaces}[path])
    assert nccl_knows_better({}) == knows


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
def test_env_wins(name, value, base):
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


def with_config(*resolved, **options):
    return DeepSpeed({}, resolved=ResolvedConfig(*resolved), **options)


def deepspeed_plan(request, node_rank=1, folder="/node"):
    placement = placed(request)
    site = Site(request, placement.shares(whole=False)[node_rank], {}, {"GLOO_SOCKET_IFNAME": "eth1"}, folder)
    return Torchrun().plan(site), request.launch.plan(site)


def test_the_deepspeed_path_adds_to_torchruns():
    options = with_config('{"a": 1}', '{"a": "auto"}', 3, "bf16", ("FusedAdamBuilder",), extensions_timeout=60.0)
    plain, plan = deepspeed_plan(job(launch=options, env={"WANDB_MODE": "offline"}))
    assert plan.files == {"deepspeed.json": '{"a": 1}', "deepspeed-given.json": '{"a": "auto"}'}
    assert plan.first is not None and plan.first.arguments == {"names": ("FusedAdamBuilder",), "timeout": 60.0}
    assert plain.first is None
    assert plan.node_env == {
        **plain.node_env,
        CONFIG_PATH: "/node/deepspeed.json",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "none",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "/node/deepspeed-given.json",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }
    assert len(plan.rank_env) == len(plain.rank_env)
    for own, added in zip(plain.rank_env, plan.rank_env):
        assert added == {**own, "CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "1"}
    assert (plan.node, plan.elsewhere) == (plain.node, ())


def test_shared_memory_of_one_node_is_named():
    request = job(launch=with_config("{}", "{}"))
    placement = placed(request, executors="aaa")
    plan = request.launch.plan(Site(request, placement.shares(whole=False)[0], folder="/node"))
    prefix = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_10.0.0.1_5000"
    assert plan.elsewhere == tuple(f"{prefix}_{rank}" for rank in range(3))


def test_the_users_environment_wins_on_the_deepspeed_path():
    env = {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_MIXED_PRECISION": "fp8"}
    _, plan = deepspeed_plan(job(launch=with_config("{}", "{}"), env=env))
    assert {name: plan.node_env[name] for name in env} == env


@pytest.mark.parametrize(
    "target",
    [Script("/home/train.py", b"", ("--lr", "1")), Module("pkg.train", ("--lr", "1")), Function("train", b"pickled")],
)
def test_every_target_gets_deepspeeds_arguments(target):
    _, plan = deepspeed_plan(job(target=target, launch=with_config("{}", "{}")))
    assert plan.target == dataclasses.replace(
        target, argv=(*target.argv, "--deepspeed", "--deepspeed_config", "/node/deepspeed.json")
    )
    assert plan.node_env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "/node/deepspeed-given.json"
    _, plan = deepspeed_plan(job(target=target, launch=with_config("{}", "{}", script_arguments="trainer")))
    assert plan.target.argv == (*target.argv, "--deepspeed", "/node/deepspeed-given.json")
    _, plan = deepspeed_plan(job(target=target, launch=DeepSpeed()))
    assert plan.target.argv == (*target.argv, "--deepspeed")
    assert not [name for name in plan.node_env if name == CONFIG_PATH or name.startswith("ACCELERATE_")]
    _, plan = deepspeed_plan(job(target=target, launch=with_config("{}", "{}", script_arguments=False)))
    assert plan.target == target
    assert plan.node_env[CONFIG_PATH] == "/node/deepspeed.json"


UNKNOWN = "train.py: error: unrecognized arguments:"
BATCH = "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu *"


HUGGING_FACE = "File transformers/trainer.py\n"


@pytest.mark.parametrize(
    ("kind", "said", "told"),
    [
        ("deepspeed", "error: argument --deepspeed: expected one argument", 'script_arguments="trainer"'),
        ("deepspeed", "error: argument --deepspeed_config: expected one argument", "add_config_arguments(parser)"),
        ("deepspeed", f"{UNKNOWN} --deepspeed --deepspeed_config /n/deepspeed.json", "script_arguments=False"),
        ("trainer", f"{UNKNOWN} --deepspeed /n/deepspeed-given.json", "script_arguments=False"),
        ("trainer", f"{UNKNOWN} /n/deepspeed-given.json", 'script_arguments="deepspeed"'),
        ("deepspeed", "are not used by the HfArgumentParser: ['--deepspeed_config', 'x']", "script_arguments=False"),
        (False, f"{UNKNOWN} --deepspeed", ""),
        ("deepspeed", f"{UNKNOWN} --lr", ""),
        (False, "the following arguments are required: --deepspeed_config", "runtime.deepspeed_config()"),
        (False, f"{HUGGING_FACE}{BATCH} gradient_acc_step * world_size 8 != 8 * 1 * 2", "pass use_cpu=True"),
        (False, f"{HUGGING_FACE}{BATCH} gradient_acc_step * world_size 16 != 8 * 1 * 1", "pass use_cpu=True"),
        (False, f"{BATCH} gradient_acc_step * world_size 16 != 8 * 1 * 1", "leave all but one of them out"),
        (False, f"{HUGGING_FACE}{BATCH} gradient_acc_step * world_size 24 != 8 * 1 * 2", "leave all but one of them"),
        (False, "ValueError: no", ""),
    ],
)
def test_advice_on_what_scripts_say_under_deepspeed(kind, said, told):
    failure = Failure(0, 0, "host-a", "exit", "exited with code 2", log_tail=said)
    advice = with_config("{}", "{}", script_arguments=kind).advise(failure, job())
    assert (told in advice) if told else advice == ""
    assert Torchrun().advise(failure, job()) == ""


def test_advice_depends_on_the_run():
    ranks, told = with_config("{}", "{}", script_arguments=False), "arguments are required: --deepspeed_config"
    failure = Failure(0, 0, "host-a", "exit", "exited with code 2", log_tail=told)
    assert ranks.advise(failure, job(target=Module("train"))) == ""
    refused = replace(failure, log_tail="error: argument --deepspeed_config: expected one argument")
    advice = with_config("{}", "{}").advise(refused, job(target=Module("train")))
    assert "add --deepspeed_config PATH" in advice
    counted = f"{HUGGING_FACE}{BATCH} gradient_acc_step * world_size 16 != 8 * 1 * 1"
    failure = Failure(0, 0, "host-a", "exit", "exited with code 2", log_tail=counted)
    assert "leave all but one" in ranks.advise(failure, job(num_processes=1))
    assert "leave all but one" in ranks.advise(failure, job(use_gpu=True))
