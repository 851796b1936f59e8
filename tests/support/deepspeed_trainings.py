"""Training functions of the DeepSpeed tests: the same small network, data and batches however many ranks there are."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Samples per step of all ranks together.
BATCH = 8

STAGES = (0, 1, 2, 3)


def config(stage: int, **sections: Any) -> dict[str, Any]:
    """Adam in fp32, as torch has it: what can be compared with DistributedDataParallel."""
    return {
        "train_batch_size": BATCH,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, "adam_w_mode": False}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000},
        **sections,
    }


def network() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def batch(step: int, dtype: Any = None) -> tuple[Any, Any]:
    """This rank's part of a step's samples."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(64, 8, generator=generator), torch.randn(64, 4, generator=generator)
    mine = [(step * BATCH + index) % 64 for index in range(BATCH)][dist.get_rank() :: dist.get_world_size()]
    return inputs[mine].to(device(), dtype), targets[mine].to(device(), dtype)


def device() -> Any:
    """Where this rank trains."""
    import torch

    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def mean(loss: Any) -> float:
    """A loss over all ranks."""
    import torch.distributed as dist

    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return float(total.item()) / dist.get_world_size()


def steps(engine: Any, first: int, last: int, dtype: Any = None) -> list[float]:
    """Trains an engine; the losses of all ranks together."""
    import torch

    losses = []
    for step in range(first, last):
        inputs, targets = batch(step, dtype)
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return losses


def start() -> Any:
    """Sets the process group up; returns DeepSpeed."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, of what DeepSpeed calls at each step
    import deepspeed

    deepspeed.init_distributed(verbose=False)  # gloo, and NCCL where there are GPUs
    return deepspeed


def warm_up() -> None:
    """Builds what DeepSpeed loads on CPUs, where it is not there yet."""
    start()


def build_extensions() -> None:
    """Builds what DeepSpeed loads on CPUs, for this user of this machine."""
    from distributor import DeepspeedTorchDistributor

    DeepspeedTorchDistributor(2, 1, True, False, config(0), logs="none").run(warm_up)


def curves(count: int) -> dict[str, list[float]]:
    """Losses of plain DistributedDataParallel and of each ZeRO stage."""
    deepspeed = start()
    import torch

    model = torch.nn.parallel.DistributedDataParallel(network().to(device()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plain = []
    for step in range(count):
        inputs, targets = batch(step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plain.append(mean(loss))
    losses = {"ddp": plain}
    for stage in STAGES:
        engine, *_ = deepspeed.initialize(model=network(), config=config(stage))
        losses[f"zero {stage}"] = steps(engine, 0, count)
    return losses


def with_the_runs_config(count: int) -> dict[str, Any]:
    """Trains with what the run was given; what this rank has seen."""
    deepspeed = start()
    from distributor import runtime

    given = runtime.deepspeed_config()
    engine, *_ = deepspeed.initialize(model=network(), config=given)
    return {
        "losses": steps(engine, 0, count),
        "config": given,
        "argv": list(sys.argv),
        "stage": engine.zero_optimization_stage(),
        "folder": os.path.dirname(os.environ["DISTRIBUTOR_DEEPSPEED_CONFIG"]),
        "extensions": os.environ["TORCH_EXTENSIONS_DIR"],
        **{name: os.environ.get(name) for name in ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK")},
    }


def with_parsed_arguments() -> dict[str, Any]:
    """Makes an engine from ``sys.argv``, as DeepSpeed's examples do."""
    deepspeed = start()
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
    engine, *_ = deepspeed.initialize(args=args, model=network())
    return {
        "deepspeed": args.deepspeed,
        "stage": engine.zero_optimization_stage(),
        "clipping": engine.gradient_clipping(),
        "accelerates": json.loads(Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())[
            "gradient_clipping"
        ],
    }


def engines(precision: str) -> Iterator[tuple[int, Any, Any]]:
    """A new engine of each stage, and the type of what it takes."""
    deepspeed = start()
    import torch

    bf16 = precision == "bf16"
    for stage in STAGES:
        engine, *_ = deepspeed.initialize(model=network(), config=config(stage, bf16={"enabled": bf16}))
        yield stage, engine, torch.bfloat16 if bf16 else None


def save(folder: str, precision: str) -> dict[int, dict[str, Any]]:
    """Trains, saves and goes on, at each stage: the losses after the save, and the weights at it."""
    from distributor import deepspeed_checkpoint

    saved = {}
    for stage, engine, dtype in engines(precision):
        steps(engine, 0, 5, dtype)
        tag = deepspeed_checkpoint.save(engine, f"{folder}/{stage}", client_state={"epoch": stage})
        weights = deepspeed_checkpoint.fp32_state_dict(engine)
        saved[stage] = {"tag": tag, "weights": weights, "losses": steps(engine, 5, 10, dtype)}
    return saved


def load(folder: str, precision: str) -> dict[int, dict[str, Any]]:
    """Goes on where :func:`save` was."""
    from distributor import deepspeed_checkpoint

    loaded = {}
    for stage, engine, dtype in engines(precision):
        state = deepspeed_checkpoint.load(engine, f"{folder}/{stage}")
        weights = deepspeed_checkpoint.fp32_state_dict(engine)
        loaded[stage] = {"state": state, "weights": weights, "losses": steps(engine, 5, 10, dtype)}
    return loaded


def save_without_zero(folder: str) -> tuple[dict[str, Any], str]:
    """Saves with ZeRO, then without ZeRO under one of the same tags: what is loaded of it, and what ZeRO is told."""
    deepspeed = start()
    from distributor import ConfigurationError, deepspeed_checkpoint

    split, *_ = deepspeed.initialize(model=network(), config=config(2))
    steps(split, 0, 1)
    for tag in ("b", "a"):
        deepspeed_checkpoint.save(split, folder, tag, {"stage": 2})
    whole, *_ = deepspeed.initialize(model=network(), config=config(0))
    steps(whole, 0, 1)
    deepspeed_checkpoint.save(whole, folder, "a", {"stage": 0})
    fresh, *_ = deepspeed.initialize(model=network(), config=config(0))
    loaded = deepspeed_checkpoint.load(fresh, folder, "a")
    fresh, *_ = deepspeed.initialize(model=network(), config=config(2))
    deepspeed_checkpoint.load(fresh, folder, "b")  # another tag, which stays
    try:
        deepspeed_checkpoint.load(fresh, folder, "a")
        refused = ""
    except ConfigurationError as error:
        refused = str(error)
    return loaded, refused


def checkpoints_that_are_none(folder: str) -> list[str]:
    """What a rank is told of checkpoints that cannot be."""
    deepspeed = start()
    import torch.distributed as dist

    from distributor import ConfigurationError, deepspeed_checkpoint

    engine, *_ = deepspeed.initialize(model=network(), config=config(2))
    errors = []

    def tell(action: Any) -> None:
        try:
            action()
        except (ConfigurationError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    tell(lambda: deepspeed_checkpoint.load(engine, folder))
    tell(lambda: deepspeed_checkpoint.load(engine, folder, "absent"))
    steps(engine, 0, 1)
    deepspeed_checkpoint.save(engine, folder, "one")
    tell(lambda: deepspeed_checkpoint.load(engine, folder, "two"))
    tell(lambda: deepspeed_checkpoint.save(engine, folder, "a/b"))
    tell(lambda: deepspeed_checkpoint.save(engine, folder, "a_universal"))

    def save_apart(folder: str, tag: str, client_state: Any) -> None:
        """As if each node had a folder of its own."""
        if dist.get_rank() == 0:
            Path(folder, tag).mkdir()
            Path(folder, tag, "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()

    engine.save_checkpoint = save_apart
    tell(lambda: deepspeed_checkpoint.save(engine, folder, "three"))
    with suppress(ConfigurationError):
        deepspeed_checkpoint.save(engine, folder, "one")
    fresh, *_ = deepspeed.initialize(model=network(), config=config(2))
    deepspeed_checkpoint.load(fresh, folder, "one")  # what was saved before
    third, *_ = deepspeed.initialize(model=network(), config=config(3))
    tell(lambda: deepspeed_checkpoint.load(third, folder, "one"))
    tell(lambda: deepspeed_checkpoint.save(third, folder, "early"))
    engine.zero_nvme_offload_optimizer = lambda: True
    tell(lambda: deepspeed_checkpoint.save(engine, folder, "four"))
    other = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=network(), config=config(1, **other))
    steps(engine, 0, 1)
    tell(lambda: deepspeed_checkpoint.save(engine, folder, "five"))
    return errors


def partly_trained(stage: int, kind: Any) -> tuple[Any, Any]:
    """An engine with tied and frozen weights, buffers, and two groups with settings of their own."""
    deepspeed = start()
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first = torch.nn.Linear(8, 8)
            self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
            self.norm = torch.nn.BatchNorm1d(8)
            self.last = torch.nn.Linear(8, 8)
            self.last.weight = self.first.weight
            self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))

        def forward(self, inputs: Any) -> Any:
            return self.last(self.norm(self.frozen(self.first(inputs))))[:, :4]

    model = Model()
    if kind is not None:
        kind(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:1], "weight_decay": 0.5, "lr": 0.02}, {"params": trained[1:], "weight_decay": 0.0}]
    sections = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config(stage, **sections))
    return engine, Model


def save_all_of_it(folder: str) -> dict[int, dict[str, Any]]:
    """What is no plain trained weight, at each stage; saved twice under one tag."""
    import torch

    from distributor import deepspeed_checkpoint

    def change(model: Any) -> None:
        with torch.no_grad():
            model.frozen.weight.fill_(0.25)
        model.counts += 7

    weights = {}
    for stage in STAGES:
        engine, plain = partly_trained(stage, change)
        steps(engine, 0, 3)
        deepspeed_checkpoint.save(engine, f"{folder}/{stage}", "last")
        steps(engine, 3, 5)
        deepspeed_checkpoint.save(engine, f"{folder}/{stage}", "last", {"saved": 2})
        weights[stage] = deepspeed_checkpoint.fp32_state_dict(engine)
        if weights[stage]:
            model = plain()
            model.load_state_dict(weights[stage])
            assert torch.equal(model.first.weight, model.last.weight)
            assert not torch.equal(model.first.weight, plain().first.weight)
    return weights


def load_all_of_it(folder: str, again: bool) -> dict[int, dict[str, Any]]:
    """The same of engines that loaded it, with the settings of their groups; saved again from this number of ranks."""
    from distributor import deepspeed_checkpoint

    loaded = {}
    for stage in STAGES:
        engine, _ = partly_trained(stage, None)
        state = deepspeed_checkpoint.load(engine, f"{folder}/{stage}")
        groups = [(group["weight_decay"], group["lr"]) for group in engine.optimizer.param_groups]
        loaded[stage] = {"weights": deepspeed_checkpoint.fp32_state_dict(engine), "state": state, "groups": groups}
        if again:
            deepspeed_checkpoint.save(engine, f"{folder}/{stage}", "last", state)
    return loaded


def pipeline(stages: int, count: int) -> list[float]:
    """Losses of a network whose layers are spread over ranks."""
    deepspeed = start()
    import torch
    import torch.distributed as dist
    from deepspeed.pipe import LayerSpec, PipelineModule

    from distributor import runtime

    layers = []
    for width in (32, 32, 32, 4):
        layers += [LayerSpec(torch.nn.Linear, 8 if not layers else 32, width), LayerSpec(torch.nn.Tanh)]
    model = PipelineModule(
        layers, num_stages=stages, loss_fn=torch.nn.MSELoss(), partition_method="uniform", seed_layers=True, base_seed=3
    )
    engine, *_ = deepspeed.initialize(model=model, config=runtime.deepspeed_config())
    generator = torch.Generator().manual_seed(7)
    data = [(torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(4)]

    def forever() -> Iterator[Any]:
        copies = dist.get_world_size() // stages  # each takes its share of the micro batches
        mine = engine.mpu.get_data_parallel_rank()
        while True:
            yield from data[mine::copies]

    samples = forever()
    return [float(engine.train_batch(samples).item()) for _ in range(count)]


def mixture(count: int) -> dict[str, Any]:
    """Experts on different ranks."""
    deepspeed = start()
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    from distributor import ConfigurationError, deepspeed_checkpoint, runtime

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first = torch.nn.Linear(8, 16)
            self.experts = MoE(16, torch.nn.Linear(16, 16), num_experts=4, ep_size=2, k=1)
            self.last = torch.nn.Linear(16, 4)

        def forward(self, inputs: Any) -> Any:
            hidden, balance, _ = self.experts(self.first(inputs))
            self.balance = balance
            return self.last(hidden)

    model = Model()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=runtime.deepspeed_config())
    losses = steps(engine, 0, count)
    local = [name for name, _ in model.named_parameters() if "deepspeed_experts" in name and name.endswith("weight")]
    try:
        deepspeed_checkpoint.fp32_state_dict(engine)
        refused = ""
    except ConfigurationError as error:
        refused = str(error)
    return {"losses": losses, "experts": len(local), "refused": refused}


def measure(unit: int) -> dict[str, float]:
    """An experiment: the throughput is made up, the memory is not."""
    import torch

    from distributor import runtime

    given = runtime.deepspeed_config()
    micro, stage = given["train_micro_batch_size_per_gpu"], given["zero_optimization"]["stage"]
    samples = torch.empty(micro * unit)  # there is no machine for the largest of them
    if stage == 2:
        raise ValueError("stage 2 diverges")
    return {"throughput": 100.0 * micro + stage + samples.ndim, "latency": 1.0 / micro}


def build(source: str) -> int:
    """Loads an extension of the user's own."""
    import torch.utils.cpp_extension as tools

    return int(tools.load(name="answer", sources=[source], extra_cflags=["-O0"]).answer())


def train_on(ready: str, count: int = 10**9) -> int:
    """Trains for so many steps with data that worker processes load; a file tells when all of it works."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    deepspeed = start()
    sizes = {"train_batch_size": BATCH * int(os.environ["WORLD_SIZE"])}
    engine, *_ = deepspeed.initialize(model=network(), config=config(2, **sizes))
    loader = DataLoader(TensorDataset(torch.ones(1000, 8)), num_workers=1, persistent_workers=True, batch_size=4)
    step = 0
    while step < count:
        for (inputs,) in loader:
            loss = engine(inputs).pow(2).mean()
            engine.backward(loss)
            engine.step()
            step += 1
            if step == 3:
                Path(ready, os.environ["RANK"]).touch()
                print("training", flush=True)
            if step == count:
                break
    return step
