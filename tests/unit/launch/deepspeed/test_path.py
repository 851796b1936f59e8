"""What DeepSpeed's path adds to torchrun's, and its advice."""

import dataclasses
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import job, placed

from distributor.launch import DeepSpeed, Torchrun
from distributor.launch.deepspeed.config import ResolvedConfig
from distributor.launch.deepspeed.path import CONFIG_PATH
from distributor.values.job import Function, Module, Script
from distributor.values.outcome import Failure
from distributor.values.plan import Site


def plan(request, node_rank=0, base_env=(), **kwargs):
    placement = placed(request, **kwargs)
    return Torchrun().plan(Site(request, placement.shares(whole=False)[node_rank], dict(base_env)))


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


CONFIG = {"train_micro_batch_size_per_gpu": 4}


class Number(float):
    """A user's number, of a class that nodes need not have."""


class Folder(str):
    """A user's path, of a class that nodes need not have."""


@pytest.mark.parametrize("as_path", [False, True])
def test_what_deepspeed_resolves_to_is_plain_data(tmp_path: Path, as_path: bool) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 4}')
    config: Any = Folder(file) if as_path else {**CONFIG, "gradient_clipping": Number(1.0)}
    path = DeepSpeed(config, {"learning_rate": Number(0.5), "total_steps": Number}).resolve(2, False)
    assert path == pickle.loads(pickle.dumps(path))
    assert not re.search(rb"Number|Folder|pathlib", pickle.dumps(path))
    assert path.auto == {"learning_rate": 0.5}
    assert path.config == (str(file) if as_path else {**CONFIG, "gradient_clipping": 1.0})
    assert path.resolve(2, False) == path
