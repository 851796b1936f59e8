"""Transformers' Trainer and TRL: tiny models with random weights, a tokenizer and data that the tests make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas
import pytest
import watch
from sessions import Make

from distributor import Data
from distributor.launch import DeepSpeed

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

#: A script as the examples of Transformers and TRL are written: arguments of their own, relative output.
SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GptOssConfig, GptOssForCausalLM, HfArgumentParser, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast

WORDS = "<pad> <eos> <unk> a b c d e f g user assistant".split()
CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT
    )


def model(kind):
    torch.manual_seed(0)
    common = dict(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1, max_position_embeddings=128,
    )
    if kind == "gpt-oss":
        return GptOssForCausalLM(GptOssConfig(**common, head_dim=8, num_local_experts=4, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**common))


def pairs():
    # They differ between samples, so that ranks that do not meet end with different weights.
    return [("abc"[i % 3], "cdefg"[i % 5]) for i in range(64)]


def data(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


def tell(trainer):
    from contextlib import nullcontext
    parameters = list(trainer.model.parameters())
    whole = nullcontext()
    if trainer.is_deepspeed_enabled:  # ZeRO-3 splits them
        import deepspeed
        whole = deepspeed.zero.GatheredParameters(parameters)
    with whole:
        weights = [parameter.detach().double().sum().item() for parameter in parameters]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    ranks, steps = dist.get_world_size(), trainer.state.global_step
    print("trained", dict(ranks=ranks, steps=steps, weights=weights, losses=losses))
"""

TRAINER = (
    SCRIPT
    + """
from transformers import Trainer, TrainingArguments
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
rows = [{"input_ids": [3 + i % 7, 4, 5, 6], "labels": [3 + i % 7, 4, 5, 6]} for i in range(64)]
trainer = Trainer(model("llama"), arguments, train_dataset=rows)
found = os.path.isdir("out") and any(name.startswith("checkpoint") for name in os.listdir("out"))
trainer.train(resume_from_checkpoint=found)
print("resumed", found)
tell(trainer)
"""
)

SFT = (
    SCRIPT
    + """
from trl import SFTConfig, SFTTrainer
kind, tuned = sys.argv.pop(1).split("+")
(arguments,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
rows = data(
    [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": f"{b} d"}]} for a, b in pairs()]
)
adapter = None
if tuned == "lora":
    from peft import LoraConfig
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = SFTTrainer(model(kind), arguments, train_dataset=rows, processing_class=tokenizer(), peft_config=adapter)
trainer.train()
tell(trainer)
"""
)

DPO = (
    SCRIPT
    + """
from trl import DPOConfig, DPOTrainer
(arguments,) = HfArgumentParser(DPOConfig).parse_args_into_dataclasses()
rows = data([{"prompt": f"{a} {b}", "chosen": f" {a} d", "rejected": f" {b} f"} for a, b in pairs()])
trainer = DPOTrainer(
    model("llama"), model("llama"), args=arguments, train_dataset=rows, processing_class=tokenizer()
)
trainer.train()
tell(trainer)
"""
)

GRPO = (
    SCRIPT
    + """
from trl import GRPOConfig, GRPOTrainer
(arguments,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()
rows = data([{"prompt": f"{a} {b}"} for a, b in pairs()])


def reward(completions, **_):
    return [float(text.count("c")) for text in completions]


trainer = GRPOTrainer(
    model("llama"), reward_funcs=reward, args=arguments, train_dataset=rows, processing_class=tokenizer()
)
trainer.train()
tell(trainer)
"""
)

#: Of each row of the table that needs TRL: the script, its own arguments, and whether its loss has to fall.
ROWS = [
    pytest.param(
        (SFT, ["llama+full"], True), id="sft-llama", marks=pytest.mark.framework("TRL", "trl", "SFT, Llama-style")
    ),
    pytest.param(
        (SFT, ["gpt-oss+full"], True),
        id="sft-gpt-oss",
        marks=[pytest.mark.long, pytest.mark.framework("TRL", "trl", "SFT, GPT-OSS-style")],
    ),
    pytest.param(
        (SFT, ["llama+lora"], True), id="sft-lora", marks=pytest.mark.framework("TRL", "trl", "SFT with LoRA")
    ),
    pytest.param((DPO, [], True), id="dpo", marks=[pytest.mark.long, pytest.mark.framework("TRL", "trl", "DPO")]),
    # The loss of GRPO begins at 0.
    pytest.param((GRPO, [], False), id="grpo", marks=pytest.mark.framework("TRL", "trl", "GRPO")),
]


def common(steps: int, **more: Any) -> list[str]:
    """Arguments of a script."""
    given = {
        "output_dir": "out",
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "seed": 0,
        **more,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def trained(out: str) -> list[dict[str, Any]]:
    """What ranks told at the end of their training."""
    return [eval(text) for text in re.findall(r"trained (\{.*\})", out)]


def assert_together(out: str, ranks: int, steps: int, learned: bool = True) -> None:
    """All ranks have trained the same model, and it has learned."""
    results = trained(out)
    assert [(result["ranks"], result["steps"]) for result in results] == [(ranks, steps)] * ranks, out
    assert all(result["weights"] == results[0]["weights"] for result in results), out
    if learned:
        assert results[0]["losses"][-1] < results[0]["losses"][0], out


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def written(source: str) -> Path:
        (tmp_path / "work").mkdir(exist_ok=True)
        (tmp_path / "work/train.py").write_text(source)
        return tmp_path / "work/train.py"

    return written


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Relative output comes back."""
    return {"working_dir": tmp_path / "work", "output_dir": tmp_path / "back"}


@pytest.mark.ci
@pytest.mark.framework("Transformers", "transformers", "Trainer, resumed")
def test_the_trainer_resumes_its_own_checkpoint(
    make: Make,
    spread: dict[str, Any],
    script: Any,
    options: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = script(TRAINER)
    distributor = make(2, **options, **spread)
    distributor.run(path, *common(4, save_strategy="steps", save_steps=2))
    first = capfd.readouterr().out
    assert (tmp_path / "back/out/checkpoint-4/model.safetensors").exists()
    distributor.run(path, *common(8, save_strategy="steps", save_steps=4))
    second = capfd.readouterr().out
    assert first.count("resumed False") == second.count("resumed True") == 2
    assert_together(first, 2, 4)
    assert_together(second, 2, 8)
    assert trained(second)[0]["losses"][:4] == trained(first)[0]["losses"]  # from the checkpoint's own record
    assert (tmp_path / "back/out/checkpoint-8/trainer_state.json").exists()


JIT = TRAINER.replace(
    "trainer.train(",
    """
from transformers import TrainerCallback


class Ready(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and os.environ["RANK"] == "0":
            open(os.environ["READY"], "w").close()


trainer.add_callback(Ready())
trainer.train(""",
)


@pytest.mark.framework("Transformers", "transformers", "a checkpoint on SIGTERM, one rank")
def test_a_checkpoint_on_sigterm_is_kept(make: Make, script: Any, options: dict[str, Any], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    # On one rank: Transformers' ranks do not agree on the step at which they stop.
    run = make(1, grace_period=60, env={"READY": str(ready)}, **options).submit(
        script(JIT), *common(100_000, enable_jit_checkpoint=True)
    )
    watch.until(ready.exists)
    run.cancel()
    assert run.wait(watch.DEADLINE)
    (kept,) = (tmp_path / "back/out").glob("checkpoint-*")
    assert {"model.safetensors", "trainer_state.json", "optimizer.pt"} <= {path.name for path in kept.iterdir()}


@pytest.mark.parametrize("row", ROWS)
def test_trl_trains(
    row: Any, make: Make, script: Any, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    source, kinds, learns = row
    more: dict[str, Any] = {"bf16": False}  # TRL's default, which needs a GPU or use_cpu
    if source is GRPO:
        more |= {"num_generations": 4, "max_completion_length": 8}
    steps = 6 if learns else 3
    run = make(2, **options).submit(script(source), *kinds, *common(steps, learning_rate=1e-2, **more))
    run.result()
    assert_together(capfd.readouterr().out, 2, steps, learns)
    assert run.progress is not None and (run.progress.step, run.progress.total) == (steps, steps)
    assert {row.step for row in run.metrics if "loss" in row.values and row.rank == 0} == {*range(1, steps + 1)}


ZERO_3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.framework("TRL", "trl", "SFT with ZeRO-3")
def test_trl_trains_with_zero_3(
    make: Make, script: Any, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    launch = DeepSpeed(ZERO_3, script_arguments="trainer")
    source = SFT + "print('with', type(trainer.model_wrapped).__name__)\n"
    given = common(6, learning_rate=1e-2, bf16=False, use_cpu=True)
    make(2, launch=launch, **options).run(script(source), "llama+full", *given)
    out = capfd.readouterr().out
    assert_together(out, 2, 6)
    assert out.count("with DeepSpeedEngine") == 2


@pytest.mark.framework("Transformers", "transformers", "one cached copy of a dataset")
def test_a_data_set_is_made_once_per_node(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n' * 100)

    def load(path: str) -> tuple[int, str]:
        import os

        import datasets
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()  # all at the same moment
        loaded = datasets.load_dataset("json", data_files=path, split="train")
        return len(loaded), os.path.dirname(loaded.cache_files[0]["filename"])

    caches = str(tmp_path / "cache")
    loaded_by_ranks = (
        make(4, env={"HF_HOME": caches, "HF_HUB_OFFLINE": "1"}).submit(load, str(tmp_path / "data.jsonl")).results()
    )
    assert {size for size, _ in loaded_by_ranks} == {200}
    (folder,) = {folder for _, folder in loaded_by_ranks}
    assert folder.startswith(caches)
    assert len(list(Path(folder).glob("*.arrow"))) == 1


def of_frame(rows: int) -> list[float]:
    """The rows that one rank's model is given in an epoch, by a Trainer whose loader is the run's."""

    import torch
    from transformers import Trainer, TrainingArguments

    from distributor import runtime

    seen: list[float] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            seen.extend(x.flatten().tolist())
            return {"loss": (self.layer(x) ** 2).mean()}

    class OfFrame(Trainer):
        def get_train_dataloader(self) -> Any:
            return runtime.dataset("train").loader(batch_size=4, shuffle=True)

    quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    trainer = OfFrame(Model(), TrainingArguments("out", num_train_epochs=1, **quiet))
    assert trainer.train().global_step == rows // 8
    return seen


def test_a_frames_rows_are_not_split_again(make_local: Make) -> None:
    frame = pandas.DataFrame({"x": [float(row) for row in range(64)]})
    data = {"train": Data(frame, lanes=2, pack={"x": ["x"]}, dtypes={"x": "float32"})}
    run = make_local(2, data=data).submit(of_frame, 64)
    results = run.results(watch.DEADLINE)
    assert sorted(row for seen in results for row in seen) == list(range(64))
    assert [len(seen) for seen in results] == [32, 32]
