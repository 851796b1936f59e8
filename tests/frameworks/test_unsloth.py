"""Unsloth: supervised fine-tuning of a tiny model with random weights; a tokenizer and data that the test makes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import watch
from sessions import Make

from distributor import TorchDistributor, TrainingError
from distributor.machine.devices import local_gpus

pytestmark = [
    pytest.mark.slow,
    # Its import changes other packages, so only ranks import it.
    pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="Unsloth is not installed"),
]

#: The system in the table of docs/frameworks.md.
SYSTEM = ("Unsloth", "unsloth")

#: Nothing from the Hub.
ENV = {"HF_HUB_OFFLINE": "1"}


def tune(full: bool) -> dict[str, Any]:
    """Trains all parameters, or adapters, and says what came of it."""
    import unsloth  # isort: skip  # before what it changes: Transformers, PEFT and TRL
    import sys

    import torch.distributed as dist
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    network, words = unsloth.FastLanguageModel.from_pretrained(
        "model", max_seq_length=16, load_in_4bit=False, full_finetuning=full
    )
    if not full:
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        network = unsloth.FastLanguageModel.get_peft_model(network, r=8, lora_alpha=64, target_modules=layers)
    arguments = SFTConfig(
        "out",
        max_steps=16,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    rows = Dataset.from_dict({"text": tiny_models.SENTENCES})
    trainer = SFTTrainer(network, args=arguments, train_dataset=rows, processing_class=words)
    trainer.train()
    trainer.save_model("out")
    return {
        "ranks": dist.get_world_size(),
        "device": trainer.args.device.type,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "weights": round(sum(parameter.float().sum().item() for parameter in network.parameters()), 2),
        "backend": sys.modules["unsloth"].DEVICE_TYPE,
    }


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a model and its tokenizer."""
    folder = tmp_path / "work"
    tiny_models.save(folder / "model", 64)
    return folder


@pytest.fixture
def options(work: Path) -> dict[str, Any]:
    """A process group of all ranks, and output that comes back."""
    return {"working_dir": work, "output_dir": work.parent / "back", "env": ENV, "require_group": True}


def assert_together(results: list[dict[str, Any]], device: str) -> None:
    """Both ranks have trained the same model."""
    assert [(result["ranks"], result["device"], result["backend"]) for result in results] == [(2, device, device)] * 2
    assert len({result["weights"] for result in results}) == 1
    losses = results[0]["losses"]
    assert len(losses) == 16
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    "full",
    [
        pytest.param(True, marks=pytest.mark.framework(*SYSTEM, "SFT")),
        pytest.param(False, marks=pytest.mark.framework(*SYSTEM, "SFT with LoRA")),
    ],
    ids=["full", "lora"],
)
def test_ranks_train_together(full: bool, make: Make, spread: dict[str, Any], options: dict[str, Any]) -> None:
    assert_together(make(2, **options, **spread).submit(tune, full).results(4 * watch.DEADLINE), "cpu")
    saved = "model.safetensors" if full else "adapter_model.safetensors"
    assert (options["output_dir"] / "out" / saved).exists()


@pytest.mark.framework(*SYSTEM, "imported before what it patches", where="local")
@pytest.mark.parametrize("preload", [["transformers"], []], ids=["transformers", "nothing"])
def test_it_is_imported_first_unless_others_are_preloaded(preload: list[str], make_local: Make) -> None:
    def complains() -> bool:
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import unsloth  # noqa: F401
        return any("Unsloth should be imported before" in str(result.message) for result in caught)

    assert make_local(1, preload=preload, env=ENV).run(complains) == bool(preload)


@pytest.mark.framework(*SYSTEM, "the error without a GPU", where="local")
def test_without_a_gpu_it_is_advised(make_local: Make, options: dict[str, Any]) -> None:
    options["env"] = {**ENV, "UNSLOTH_DISABLE_CPU_FALLBACK": "1"}
    with pytest.raises(TrainingError, match="Unsloth detected signs of an AMD ROCm GPU") as caught:
        make_local(2, **options).run(tune, True)
    assert "The code asks for a GPU, but with use_gpu=False ranks see none" in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(len(local_gpus(os.environ)) < 2, reason="fewer than two GPUs are visible on this machine")
@pytest.mark.framework(*SYSTEM, "SFT with LoRA", where="GPU")
def test_ranks_train_together_on_gpus(options: dict[str, Any]) -> None:
    assert_together(TorchDistributor(2, True, **options).submit(tune, False).results(4 * watch.DEADLINE), "cuda")
