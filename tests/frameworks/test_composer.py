"""MosaicML's Composer and LLM Foundry: tiny models with random weights, data that the tests make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vision_ops
import watch
from sessions import Make

vision_ops.declare()
pytest.importorskip("composer")

pytestmark = pytest.mark.slow

#: The batches of an epoch of Composer's test, and the tokens of a sample of LLM Foundry's.
BATCHES, TOKENS = 8, 16

#: How many words LLM Foundry's tokenizer knows.
WORDS = 32

#: A file as LLM Foundry has them in scripts/train/yamls: a small MPT.
YAML = f"""
max_seq_len: {TOKENS}
max_duration: 1000ba
global_train_batch_size: 16
device_train_microbatch_size: 8
device_eval_batch_size: 8
precision: fp32
python_log_level: warning
model:
  name: mpt_causal_lm
  init_device: cpu
  d_model: 32
  n_heads: 4
  n_layers: 2
  max_seq_len: ${{max_seq_len}}
  vocab_size: {WORDS}
  attn_config: {{attn_impl: torch}}
  loss_fn: torch_crossentropy
tokenizer:
  name: tokenizer
  kwargs: {{model_max_length: "${{max_seq_len}}"}}
train_loader:
  name: text
  dataset: {{local: data, split: null, shuffle: true, max_seq_len: "${{max_seq_len}}"}}
  drop_last: true
  num_workers: 1
optimizer:
  name: decoupled_adamw
  lr: 1.0e-2
  betas: [0.9, 0.95]
  eps: 1.0e-8
  weight_decay: 0.0
scheduler:
  name: constant_with_warmup
  t_warmup: 0ba
loggers:
  inmemory: {{}}
"""


def summary(trainer: Any, logged: Any) -> dict[str, Any]:
    """What a rank tells of its training: the weights are its own, the losses the mean of all ranks."""
    from composer.utils import dist

    model = trainer.state.model
    return {
        "ranks": dist.get_world_size(),
        "wrapped": type(model).__name__,
        "batches": int(trainer.state.timestamp.batch),
        "losses": [float(loss) for _, loss in logged.data["loss/train/total"]],
        "weights": [float(parameter.detach().double().sum()) for parameter in model.parameters()],
    }


def fit(folder: str, epochs: int, resume: str) -> dict[str, Any]:
    """Trains a classifier of points with Composer, which saves a checkpoint after each epoch."""
    import os

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    vision_ops.declare()
    from composer import Trainer
    from composer.loggers import InMemoryLogger
    from composer.models import ComposerClassifier
    from composer.utils import dist

    torch.manual_seed(0)
    points = torch.randn(BATCHES * 16, 2)
    data = TensorDataset(points, (points.sum(dim=1) > 0).long())
    network = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    latest = f"{folder}/latest-rank0.pt"
    trainer = Trainer(
        model=ComposerClassifier(network, num_classes=2),
        train_dataloader=DataLoader(data, batch_size=8, sampler=dist.get_sampler(data, shuffle=True)),
        optimizers=torch.optim.Adam(network.parameters(), 0.02),
        max_duration=f"{epochs}ep",
        run_name="points",
        save_folder=folder,
        autoresume=resume == "autoresume",
        load_path=latest if resume == "load_path" and os.path.exists(latest) else None,
        loggers=(logged := InMemoryLogger()),
        progress_bar=False,
    )
    began = int(trainer.state.timestamp.batch)
    trainer.fit()
    return {"began": began, **summary(trainer, logged)}


def pretrain(folder: str) -> dict[str, Any]:
    """Trains with LLM Foundry what the file in the folder says."""
    import os

    vision_ops.declare()
    from composer.loggers import InMemoryLogger
    from llmfoundry.command_utils import train_from_yaml

    os.chdir(folder)  # for all ranks of a host: they wait for a file there
    trainer = train_from_yaml("mpt.yaml", ["max_duration=8ba"])
    (logged,) = (destination for destination in trainer.logger.destinations if isinstance(destination, InMemoryLogger))
    return summary(trainer, logged)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A folder with a tokenizer, shards of tokens (words in their order, from each word on), and the file."""
    import numpy as np
    from streaming import MDSWriter
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w1").save_pretrained(
        tmp_path / "tokenizer"
    )
    with MDSWriter(out=str(tmp_path / "data"), columns={"tokens": "ndarray:int32"}) as writer:
        for first in range(4 * WORDS):
            writer.write({"tokens": (np.arange(TOKENS, dtype=np.int32) + first) % WORDS})
    (tmp_path / "mpt.yaml").write_text(YAML)
    return str(tmp_path)


def assert_together(results: list[dict[str, Any]], batches: int) -> None:
    """All ranks have trained the same model, and it has learned."""
    assert [(result["ranks"], result["batches"], result["wrapped"]) for result in results] == [
        (2, batches, "DistributedDataParallel")
    ] * 2
    assert results[0]["weights"] == results[1]["weights"]
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["losses"][-1] < 0.8 * results[0]["losses"][0]


@pytest.mark.parametrize(
    "resume",
    [
        pytest.param("load_path", marks=pytest.mark.framework("Composer", "mosaicml", "resumed by load_path")),
        pytest.param("autoresume", marks=pytest.mark.framework("Composer", "mosaicml", "resumed by autoresume")),
    ],
)
def test_composer_trains_and_resumes(make: Make, spread: dict[str, Any], resume: str, tmp_path: Path) -> None:
    # Numbered apart, the first rank of each executor would write, and remove, the same file in the folder.
    distributor = make(2, local_ranks="host" if resume == "autoresume" else "executor", **spread)
    first = distributor.submit(fit, str(tmp_path), 2, resume).results(watch.DEADLINE)
    assert_together(first, 2 * BATCHES)
    assert {result["began"] for result in first} == {0}
    second = distributor.submit(fit, str(tmp_path), 4, resume).results(watch.DEADLINE)
    assert_together(second, 4 * BATCHES)
    assert {result["began"] for result in second} == {2 * BATCHES}
    assert second[0]["losses"][0] < first[0]["losses"][0] / 2


@pytest.mark.framework("LLM Foundry", "llm-foundry", "train_from_yaml with an MPT model")
def test_llm_foundry_trains(make: Make, spread: dict[str, Any], corpus: str) -> None:
    pytest.importorskip("llmfoundry")
    assert_together(make(2, local_ranks="host", **spread).submit(pretrain, corpus).results(2 * watch.DEADLINE), 8)
