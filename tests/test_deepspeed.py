"""Training with DeepSpeed: on this machine without Spark, and across two executors."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed_trainings as trainings
import pytest
import watch
from sessions import LOCAL, MASTERS

from distributor import (
    ConfigurationError,
    DeepspeedTorchDistributor,
    StartError,
    TrainingError,
    autotune,
    runtime,
    zero,
)

pytestmark = pytest.mark.usefixtures("deepspeed")

MakeDeepspeed = Callable[..., DeepspeedTorchDistributor]

CLUSTER = MASTERS[-1]


@pytest.fixture(scope="session", params=[LOCAL, pytest.param(CLUSTER, marks=[pytest.mark.spark, pytest.mark.slow])])
def mode(request: pytest.FixtureRequest) -> str:
    """One node, or two executors."""
    return str(request.param)


@pytest.fixture
def make(local: bool) -> MakeDeepspeed:
    return partial(quiet, local)


def quiet(local: bool, ranks: int = 2, config: Any = None, **options: Any) -> DeepspeedTorchDistributor:
    return DeepspeedTorchDistributor(ranks, 1, local, False, config, **{"logs": "none", **options})


make_local = partial(quiet, True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_stage_learns_as_plain_ddp_does(ranks: int, make: MakeDeepspeed, local: bool) -> None:
    run = make(ranks, trainings.config(0)).submit(trainings.curves, 100)
    found = run.result(timeout=5 * watch.DEADLINE)
    assert run.placement is not None
    assert len(run.placement.nodes) == (1 if local else 2)
    plain = found.pop("ddp")
    assert len(plain) == 100 and plain[-1] < 0.8 * plain[0]
    assert set(found) == {f"zero {stage}" for stage in trainings.STAGES}
    for name, losses in found.items():
        assert losses == pytest.approx(plain, abs=1e-4), name


@pytest.mark.long
def test_a_function_gets_the_final_configuration(make: MakeDeepspeed, local: bool) -> None:
    config = zero(3, precision="fp32", torch_adam=True, learning_rate=1e-2)
    run = make(2, config, auto={"micro_batch_size": 4, "hidden_size": 32}).submit(trainings.with_the_runs_config, 20)
    first, second = run.results(timeout=2 * watch.DEADLINE)
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0]
    assert (first["stage"], first["config"]) == (3, run.deepspeed_config)
    assert run.deepspeed_config is not None
    assert run.deepspeed_config["train_batch_size"] == 8
    assert run.deepspeed_config["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert first["argv"] == ["", "--deepspeed", "--deepspeed_config", f"{first['folder']}/deepspeed.json"]
    nodes = "1" if local else "2"
    assert (first["CROSS_SIZE"], second["CROSS_RANK"]) == (nodes, "0" if local else "1")
    assert first["LOCAL_SIZE"] == ("2" if local else "1")
    for seen in (first, second):
        watch.until(lambda seen=seen: not Path(seen["folder"]).exists())  # type: ignore[misc]
        assert not seen["extensions"].startswith(seen["folder"])


SCRIPT = """
import argparse, json, os, sys, warnings
import deepspeed, torch

warnings.filterwarnings("ignore", category=FutureWarning)
parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--scale", type=float)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
model = torch.nn.Linear(4, 2)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
loss = engine(torch.ones(1, 4) * args.scale).pow(2).mean()
engine.backward(loss)
engine.step()
with open(os.path.join(args.out, os.environ["RANK"]), "w") as file:
    json.dump([args.deepspeed, engine.zero_optimization_stage(), engine.train_batch_size(), sys.argv[1:5]], file)
"""


@pytest.mark.long_on_executors
def test_a_script_gets_deepspeeds_arguments(make: MakeDeepspeed, tmp_path: Path) -> None:
    """Numbers among its own arguments are written out, as PySpark's distributor does."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = tmp_path / "ds.yaml"
    path.write_text(
        json.dumps({**trainings.config(2), "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 1})
    )
    make(2, path).run(script, "--out", tmp_path, "--scale", 0.5)
    for rank in "01":
        assert json.loads((tmp_path / rank).read_text()) == [True, 2, 2, ["--out", str(tmp_path), "--scale", "0.5"]]


@pytest.mark.long
def test_a_function_parses_deepspeeds_arguments(make: MakeDeepspeed) -> None:
    """As with PySpark's distributor, which runs DeepSpeed's examples; Accelerate's configuration keeps its "auto"."""
    config = {**trainings.config(2), "gradient_clipping": "auto"}
    run = make(2, config).submit(trainings.with_parsed_arguments)
    for seen in run.results(timeout=2 * watch.DEADLINE):
        assert seen == {"deepspeed": True, "stage": 2, "clipping": 1.0, "accelerates": "auto"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({"bf16": {"enabled": True}}, {}, ["--deepspeed", "--deepspeed_config"]),
        pytest.param(None, {}, ["--deepspeed"], marks=pytest.mark.long),
        pytest.param({"bf16": {"enabled": True}}, {"script_arguments": False}, [], marks=pytest.mark.long),
    ],
)
def test_arguments_of_a_module(config: Any, options: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "pkg.py").write_text("import json, sys; open(sys.argv[1], 'w').write(json.dumps(sys.argv))")
    out = tmp_path / "out"
    make_local(1, config, working_dir=tmp_path, **options).run_module("pkg", str(out))
    argv = json.loads(out.read_text())
    assert [argument for argument in argv[2:] if argument.startswith("--")] == expected
    if "--deepspeed_config" in expected:
        assert argv[-1].endswith("/deepspeed.json") and not os.path.exists(argv[-1])


@pytest.mark.long
def test_a_plain_function_needs_nothing_compiled(tmp_path: Path) -> None:
    """What PySpark's own tests do, on executors without a compiler."""

    def pythagoras(a: float, b: float) -> float:
        import deepspeed

        assert deepspeed.__version__
        return float((a * a + b * b) ** 0.5)

    distributor = make_local(2, env={"CXX": "/none", "TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert distributor.run(pythagoras, 3, 4) == 5.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_outside_of_a_run_there_is_no_configuration() -> None:
    with pytest.raises(ConfigurationError, match=r"in a rank of DeepspeedTorchDistributor\("):
        runtime.deepspeed_config()
    run = make_local(1).submit(runtime.deepspeed_config)
    told = "this run has no DeepSpeed configuration: start it with DeepspeedTorchDistributor"
    with pytest.raises(TrainingError, match=told):
        run.result()
    assert run.deepspeed_config is None


@pytest.mark.long
def test_a_missing_compiler_is_named_before_training(make: MakeDeepspeed) -> None:
    run = make(2, trainings.config(1), env={"CXX": "/opt/none/c++"}).submit(trainings.with_the_runs_config, 1)
    with pytest.raises(StartError) as caught:
        run.result(timeout=watch.DEADLINE)
    text = str(caught.value)
    assert (
        text.startswith("on ") and "DeepSpeed compiles its deepspeed_shm_comm on first use, but there is no C++" in text
    )
    assert "'/opt/none/c++' on the PATH (apt-get install g++; CXX names it)" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_an_extension_is_built_once_per_node(tmp_path: Path) -> None:
    """Even where a process that built was killed: torch's own lock file would keep all others waiting for ever."""
    source, cache, log, compiler = (tmp_path / name for name in ("answer.cpp", "cache", "log", "compiler"))
    source.write_text(
        "#include <Python.h>\n"
        "static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }\n"
        'static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};\n'
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer", "", -1, methods};\n'
        "PyMODINIT_FUNC PyInit_answer() { return PyModule_Create(&module); }\n"
    )
    (cache / "answer").mkdir(parents=True)
    (cache / "answer" / "lock").touch()
    compiler.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*) echo compiled >> {log};; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    distributor = make_local(3, env={"TORCH_EXTENSIONS_DIR": str(cache), "CXX": str(compiler)})
    for _ in range(2):
        assert distributor.submit(trainings.build, str(source)).results(3 * watch.DEADLINE) == [42] * 3
        assert log.read_text() == "compiled\n"


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(precision: str, tmp_path: Path) -> None:
    import torch

    saved = make_local(2, trainings.config(0)).run(trainings.save, str(tmp_path), precision)
    for ranks in (4, 1):
        loaded = make_local(ranks, trainings.config(0)).run(trainings.load, str(tmp_path), precision)
        for stage in trainings.STAGES:
            one, other = saved[stage], loaded[stage]
            assert other["state"] == {"epoch": stage}
            assert one["tag"] == "global_step5"
            assert other["losses"] == pytest.approx(one["losses"], abs=1e-5 if precision == "fp32" else 2e-2), stage
            assert list(one["weights"]) == list(other["weights"]) == list(trainings.network().state_dict())
            for name, weight in one["weights"].items():
                assert weight.dtype is torch.float32
                assert torch.equal(weight, other["weights"][name]), (stage, name)
    plain = trainings.network()
    plain.load_state_dict(saved[3]["weights"])
    # In bf16, what training computes with is a rounding of the fp32 weights; these are not.
    exact = all(torch.equal(weight, weight.bfloat16().float()) for weight in saved[3]["weights"].values())
    assert not exact


@pytest.mark.long
def test_all_of_a_model_is_in_a_checkpoint(tmp_path: Path) -> None:
    """Buffers, frozen weights and each group's settings too; saved again under the same tag by fewer ranks."""
    import torch

    first, second = make_local(4, trainings.config(0)).submit(trainings.save_all_of_it, str(tmp_path)).results()[:2]
    assert all(weights == {} for weights in second.values())
    for ranks, again in ((2, True), (1, False)):
        loaded = make_local(ranks, trainings.config(0)).run(trainings.load_all_of_it, str(tmp_path), again)
        for stage in trainings.STAGES:
            assert loaded[stage]["state"] == {"saved": 2}
            assert loaded[stage]["groups"] == [(0.5, 0.02), (0.0, 0.01)], stage
            assert set(first[stage]) == set(loaded[stage]["weights"])
            for name, weight in first[stage].items():
                assert torch.equal(weight, loaded[stage]["weights"][name]), (ranks, stage, name)
        assert torch.all(first[3]["frozen.weight"] == 0.25) and first[3]["counts"].tolist() == [7, 7, 7]


@pytest.mark.long
def test_a_checkpoint_without_zero_replaces_one_with_zero(tmp_path: Path) -> None:
    run = make_local(2, trainings.config(0)).submit(trainings.save_without_zero, str(tmp_path))
    for loaded, refused in run.results(timeout=watch.DEADLINE):
        assert loaded == {"stage": 0}
        assert refused == f"there is no checkpoint '{tmp_path / 'a_universal'}'; the folder has a, b, b_universal"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["a", "b", "b_universal"]


@pytest.mark.long
def test_wrong_checkpoints_are_refused(tmp_path: Path) -> None:
    run = make_local(2, trainings.config(0)).submit(trainings.checkpoints_that_are_none, str(tmp_path))
    for none, absent, two, slash, universal, three, stage, early, four, five in run.results(timeout=watch.DEADLINE):
        assert (
            none
            == f"ConfigurationError: there is no checkpoint in '{tmp_path}': the file 'latest_universal' is missing"
        )
        assert absent.endswith("absent_universal'; the folder has no checkpoints")
        assert two.endswith("two_universal'; the folder has one, one_universal")
        assert slash == "ConfigurationError: tag 'a/b' must be the name of a folder and must not end in '_universal'"
        assert "tag 'a_universal' must be" in universal
        assert "rank 0 sees the shards of 1 of 2 ranks in" in three and "a folder that all nodes share" in three
        assert "was saved with ZeRO stage 2, but this engine has stage 3: use the same stage, or move" in stage
        assert "ZeRO-3's optimizer has no state before its first step" in early
        assert "of optimizer states that are offloaded to NVMe: use engine.save_checkpoint, whose shards can be" in four
        assert "DeepSpeed makes universal checkpoints only for optimizers like Adam; engine.load_checkpoint can" in five


@pytest.mark.spark
@pytest.mark.long
def test_pipelines_across_two_executors(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("sessions").get(CLUSTER)

    def train(ranks: int, stages: int, local: bool) -> list[float]:
        config = trainings.config(0, train_batch_size=16, train_micro_batch_size_per_gpu=4, pipeline={"stages": stages})
        run = DeepspeedTorchDistributor(ranks, 1, local, False, config, logs="none").submit(
            trainings.pipeline, stages, 10
        )
        results = run.results(timeout=3 * watch.DEADLINE)
        assert run.placement is not None
        assert len(run.placement.nodes) == (1 if local else 2)
        assert all(losses == results[0] for losses in results)
        return list(results[0])

    alone = train(1, 1, local=True)
    assert alone[-1] < alone[0]
    for ranks, stages in ((2, 2), (4, 4)):
        assert train(ranks, stages, local=False) == pytest.approx(alone, abs=1e-5), (ranks, stages)


@pytest.mark.long
@pytest.mark.spark
def test_experts_on_two_executors(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("sessions").get(CLUSTER)
    run = DeepspeedTorchDistributor(2, 1, False, False, trainings.config(0), logs="none").submit(trainings.mixture, 20)
    for seen in run.results(timeout=2 * watch.DEADLINE):
        assert seen["experts"] == 2  # of four
        assert seen["losses"][-1] < seen["losses"][0]
        assert seen["refused"].startswith("every rank's module must have all parameters of the model. For a pipeline,")


@pytest.mark.long
def test_autotuning_survives_what_goes_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    tuning = autotune(
        trainings.measure,
        {"train_micro_batch_size_per_gpu": [1, 4, 10**12, 5], "zero_optimization.stage": [1, 2]},
        distributor=make_local(
            1, {"train_batch_size": "auto", "gradient_accumulation_steps": 1, "zero_optimization": {}}
        ),
        args=(10**6,),
        on_experiment=lambda experiment: shown.append(experiment.state),
    )
    states = [experiment.state for experiment in tuning.experiments]
    assert states == ["finished", "failed"] * 2 + ["out of memory"] * 2 + ["finished", "failed"] == shown
    assert tuning.best is tuning.experiments[6]
    assert tuning.best_config["train_batch_size"] == "auto"  # for any number of ranks
    assert tuning.best_config["train_micro_batch_size_per_gpu"] == 5
    assert "ValueError: stage 2 diverges" in str(tuning)
    assert str(tuning).count("<- best") == 1


@pytest.mark.long
def test_steps_that_only_a_trainer_knows() -> None:
    config = trainings.config(1, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})
    text = (
        "scheduler.params.total_num_steps is 'auto', and only Hugging Face's Trainer or Accelerate's DummyScheduler "
        "can replace it: replace 'auto' with the number of training steps, or pass this number in the argument "
        "auto={'total_steps'"
    )
    with pytest.raises(TrainingError, match=re.escape(text)):
        make_local(1, config).run(runtime.deepspeed_config)
    found = make_local(1, config, auto={"total_steps": 10}).run(runtime.deepspeed_config)
    assert found["scheduler"]["params"]["total_num_steps"] == 10


@pytest.mark.long
def test_autotuning_says_what_is_refused_or_too_slow() -> None:
    def sleep() -> float:
        import time

        from distributor import runtime

        time.sleep(3600 if runtime.deepspeed_config()["train_batch_size"] == 4 else 0)
        return 1.0

    tuning = autotune(
        sleep,
        [{"train_batch_size": size} for size in (2, 3, 4)] + [{"optimizer.type": "Lamb"}],
        "latency",
        distributor=make_local(2, {"zero_optimization": {"stage": 1}}, grace_period=0.1),
        timeout=watch.DEADLINE / 3,
    )
    assert [experiment.state for experiment in tuning.experiments] == ["finished", "refused", "too slow", "failed"]
    assert "train_batch_size 3 is not a multiple of 2 ranks" in tuning.experiments[1].reason
    assert "needs DeepSpeed's FusedLamb, which does not exist for 'cpu' devices" in tuning.experiments[3].reason
    with pytest.raises(ConfigurationError, match="the function must return 'throughput'"):
        autotune(dict, {"steps_per_print": [1]}, distributor=make_local(1, {}))


ACCELERATED = """
import warnings, json, os, sys
import torch
from accelerate import Accelerator

warnings.filterwarnings("ignore", category=FutureWarning)
accelerator = Accelerator(cpu=False)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 4)), batch_size=3)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (inputs,) in data:
    loss = model(inputs).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
found = [
    type(model).__name__, str(accelerator.distributed_type), model.zero_optimization_stage(),
    model.train_micro_batch_size_per_gpu(), model.train_batch_size(), accelerator.mixed_precision,
]
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(json.dumps(found))
"""

TRAINED = """
import warnings, json, os, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

warnings.filterwarnings("ignore", category=FutureWarning)
arguments = TrainingArguments(
    output_dir=sys.argv[1] + "/out", per_device_train_batch_size=3, learning_rate=3e-4, max_steps=2, save_strategy="no",
    report_to="none", disable_tqdm=True,
)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False))
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(24)]
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
engine = trainer.model_wrapped
found = [
    type(engine).__name__, engine.zero_optimization_stage(), engine.train_micro_batch_size_per_gpu(),
    engine.train_batch_size(), engine._config.zero_config.reduce_bucket_size, engine._config.optimizer_params["lr"],
]
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(json.dumps(found))
"""

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "script", "config", "expected"),
    [
        (
            "accelerate",
            ACCELERATED,
            {**AUTO, "zero_optimization": {"stage": 2}},
            ["DeepSpeedEngine", "DistributedType.DEEPSPEED", 2, 3, 3, "no"],
        ),
        pytest.param(
            "transformers",
            TRAINED,
            {**AUTO, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}},
            ["DeepSpeedEngine", 2, 3, 3, 256, 3e-4],
            marks=pytest.mark.long,
        ),
    ],
)
def test_libraries_find_deepspeed(library: str, script: str, config: Any, expected: list[Any], tmp_path: Path) -> None:
    """As with their own launchers: nothing in the script says that it is DeepSpeed; "auto" is theirs to fill.

    One rank: without GPUs, Accelerate takes each rank for the only one, whoever launches it.
    """
    pytest.importorskip(library)
    path = tmp_path / "train.py"
    path.write_text(script)
    make_local(1, config, script_arguments=False).run(path, tmp_path)
    assert json.loads((tmp_path / "0").read_text()) == expected


@pytest.mark.long
def test_the_environment_is_that_of_accelerates_launcher(tmp_path: Path) -> None:
    launch = pytest.importorskip("accelerate.utils.launch")
    parser = pytest.importorskip("accelerate.commands.launch").launch_command_parser()

    def environment() -> tuple[dict[str, str], str]:
        mine = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
        return mine, Path(mine["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text()

    config = {**AUTO, "bf16": {"enabled": True}}
    mine, given = make_local(1, config, auto={"gradient_clipping": 0.5}).run(environment)
    assert json.loads(given) == {**config, "gradient_clipping": 0.5}
    arguments = "--use_deepspeed --num_processes=1 --num_machines=1 --mixed_precision=bf16 --main_process_port=0 x.py"
    asked = parser.parse_args(arguments.split())
    asked.deepspeed_config_file, asked.zero_stage = mine["ACCELERATE_DEEPSPEED_CONFIG_FILE"], 2
    asked.deepspeed_fields_from_accelerate_config = None
    _, theirs = launch.prepare_deepspeed_cmd_env(asked)
    assert mine == {name: theirs[name] for name in theirs if name.startswith("ACCELERATE_")}


@pytest.mark.long_on_executors
def test_errors_are_as_true_as_on_the_plain_path(make: MakeDeepspeed) -> None:
    def fail() -> None:
        deepspeed = trainings.start()
        engine, *_ = deepspeed.initialize(model=trainings.network(), config=trainings.config(3))
        if int(os.environ["RANK"]) == 1:
            raise ValueError("learning rate must be positive")
        trainings.steps(engine, 0, 10)

    with pytest.raises(
        TrainingError, match="^rank 1 on .* failed: ValueError: learning rate must be positive"
    ) as caught:
        make(2, trainings.config(3), grace_period=1).submit(fail).result(timeout=2 * watch.DEADLINE)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "\tat " not in str(caught.value)


@pytest.mark.long
def test_the_driver_needs_no_deepspeed(tmp_path: Path) -> None:
    """Configurations are data: what makes one imports neither DeepSpeed nor torch."""
    import subprocess

    code = (
        "import sys; sys.modules.update(dict.fromkeys(('deepspeed', 'torch'))); import distributor as d; "
        "d.DeepspeedTorchDistributor(2, 1, True, False, d.zero(3)); d.suggest_zero(10**9)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.spark
@pytest.mark.long
def test_the_example_trains_on_executors_as_function_and_as_script() -> None:
    import subprocess

    script = Path(__file__).parent.parent / "examples" / "deepspeed_zero3.py"
    command = [sys.executable, str(script), "--steps", "30", "--master", "local-cluster[2,1,1024]"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=8 * watch.DEADLINE).stdout
    first, last = map(float, re.findall(r"^loss (\S+) at first, (\S+) on held-out text", told, re.MULTILINE)[0])
    assert 5 < first < 6 and last < 0.7 * first
    assert re.findall(r"held-out loss (\S+);", told) == [f"{last:.3f}"]  # the script comes to the same


@pytest.mark.long
def test_ranks_that_are_started_anew() -> None:
    distributor = make_local(2, trainings.config(1), start_method="spawn")
    found = distributor.run(trainings.with_the_runs_config, 3)
    assert (found["stage"], found["LOCAL_SIZE"]) == (1, "2")
