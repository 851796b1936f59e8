"""Axolotl: its function and its command, with a tiny random model, a tokenizer and data that the test makes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import watch
from sessions import Make

from distributor import TorchDistributor, TrainingError
from distributor.machine.devices import local_gpus

pytest.importorskip("axolotl")

pytestmark = pytest.mark.slow

#: The system in the table of docs/frameworks.md.
SYSTEM = ("Axolotl", "axolotl")

#: Neither its telemetry nor the Hub: each waits long where there is no network.
ENV = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}

CONFIG = """
base_model: model
datasets:
  - path: data.jsonl
    ds_type: json
    type: completion
dataset_prepared_path: {prepared}
sequence_len: 16
micro_batch_size: 4
gradient_accumulation_steps: 1
max_steps: 16
learning_rate: 0.01
lr_scheduler: constant
optimizer: adamw_torch
bf16: false
tf32: false
logging_steps: 1
save_strategy: "no"
output_dir: out
plugins:
  - tell.Tell
"""

#: Where its command is to load the model, on CPUs.
ON_CPUS = "max_memory:\n  cpu: 8GiB\n"

PLUGIN = """
import torch.distributed as dist
from axolotl.integrations.base import BasePlugin


class Tell(BasePlugin):
    def post_trainer_create(self, cfg, trainer):
        self.trainer = trainer

    def post_train(self, cfg, model):
        if not dist.is_initialized():
            return  # the second call, after the process group
        weights = round(sum(parameter.sum().item() for parameter in model.parameters()), 3)
        logged = [log["loss"] for log in self.trainer.state.log_history if "loss" in log]
        device = next(model.parameters()).device.type
        print("trained", dict(ranks=dist.get_world_size(), losses=logged, weights=weights, device=device))
"""

#: Adapters, without kernels that need a GPU.
LORA = """
adapter: lora
lora_r: 8
lora_alpha: 64
lora_target_linear: true
lora_mlp_kernel: false
lora_qkv_kernel: false
lora_o_kernel: false
"""


def tune(config: str) -> int:
    """Trains as ``axolotl.cli.train`` does, on CPUs."""
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    cfg = load_cfg(config)
    cfg.device_map = {"": "cpu"}
    _, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    return int(trainer.state.global_step)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A project: model, tokenizer, data, configuration and a plugin that says what each rank has trained."""
    folder = tmp_path / "work"
    tiny_models.save(folder / "model", 32)
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in tiny_models.SENTENCES))
    configure(folder)
    (folder / "tell.py").write_text(PLUGIN)
    return folder


def configure(work: Path, more: str = "") -> None:
    """Write the configuration. All nodes prepare the data in one folder."""
    (work / "tune.yaml").write_text(CONFIG.format(prepared=work.parent / "prepared") + more)


@pytest.fixture
def options(work: Path, spread: dict[str, Any]) -> dict[str, Any]:
    """A process group of all ranks, output that comes back, and one rank on each executor."""
    return {"working_dir": work, "output_dir": work.parent / "back", "env": ENV, "require_group": True, **spread}


def assert_together(out: str, device: str = "cpu", fall: float = 0.5) -> None:
    """Both ranks have trained the same model, and the loss has fallen to a part of what it was."""
    results = [eval(text) for text in re.findall(r"trained (\{.*\})", out)]
    assert [(result["ranks"], result["device"]) for result in results] == [(2, device)] * 2, out
    assert len({result["weights"] for result in results}) == 1
    losses = results[0]["losses"]
    assert len(losses) == 16
    assert losses[-1] < fall * losses[0]


def assert_saved(folder: Path) -> None:
    """What rank 0 has saved is another model than the one that was there before."""
    from safetensors.torch import load_file

    saved, before = (load_file(path / "model.safetensors") for path in (folder / "back/out", folder / "work/model"))
    assert saved.keys() == before.keys()
    assert any(not saved[name].equal(before[name]) for name in saved)
    assert (folder / "back/out/tokenizer.json").exists()


@pytest.mark.framework(*SYSTEM, "axolotl's train function")
def test_its_function_trains(
    make: Make, options: dict[str, Any], work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert make(2, **options).submit(tune, "tune.yaml").results(4 * watch.DEADLINE) == [16, 16]
    assert_together(capfd.readouterr().out)
    assert_saved(work.parent)


@pytest.mark.framework(*SYSTEM, "the axolotl command")
def test_its_command_trains(make: Make, options: dict[str, Any], work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure(work, ON_CPUS)
    make(2, **options).run_module("axolotl.cli.train", "tune.yaml")
    assert_together(capfd.readouterr().out)
    assert_saved(work.parent)


@pytest.mark.framework(*SYSTEM, "the axolotl command with LoRA")
def test_its_command_trains_adapters(
    make: Make, options: dict[str, Any], work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(work, ON_CPUS + LORA)
    make(2, **options).run_module("axolotl.cli.train", "tune.yaml", "--learning_rate", "0.02")
    assert_together(capfd.readouterr().out, fall=0.95)  # its weights are random, and most of them stay as they are
    assert (work.parent / "back/out/adapter_model.safetensors").exists()


@pytest.mark.framework(*SYSTEM, "the error without a GPU", where="local")
def test_its_command_without_a_place_for_the_model_is_advised(make_local: Make, work: Path) -> None:
    with pytest.raises(TrainingError, match="Cannot access accelerator device") as caught:
        make_local(2, working_dir=work, env=ENV).run_module("axolotl.cli.train", "tune.yaml")
    assert "The code asks for a GPU, but with use_gpu=False ranks see none" in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(len(local_gpus(os.environ)) < 2, reason="fewer than two GPUs are visible on this machine")
@pytest.mark.framework(*SYSTEM, "the axolotl command", where="GPU")
def test_its_command_trains_on_gpus(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    distributor = TorchDistributor(2, True, working_dir=work, output_dir=work.parent / "back", env=ENV)
    distributor.run_module("axolotl.cli.train", "tune.yaml")
    assert_together(capfd.readouterr().out, "cuda")
    assert_saved(work.parent)
