"""Train a small GPT on Python's documentation with DeepSpeed's ZeRO-3, as a function and as a script.

``make demo-deepspeed`` trains on this machine without Spark; with ``--master 'local-cluster[2,1,2048]'``, the same two
calls train on Spark's executors. The text comes with Python itself: 2 MB of its documentation and library.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

#: Number of bytes of the text, and of one sample.
TEXT, CONTEXT = 2_000_000, 64


def text() -> bytes:
    """Return Python's documentation of the language, then the sources of its library, up to 2 MB."""
    import pydoc_data.topics
    import sysconfig
    from pathlib import Path

    pieces = [topic.encode() for _, topic in sorted(pydoc_data.topics.topics.items())]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces.append(path.read_bytes())
    return b"\n".join(pieces)[:TEXT]


def gpt(width: int, layers: int, heads: int = 4) -> Any:
    """Return a decoder of bytes: embeddings, blocks of causal attention and a perceptron, and a head."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.attention = nn.Linear(width, 3 * width)
            self.projection = nn.Linear(width, width)
            self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, hidden: Any) -> Any:
            batch, length, _ = hidden.shape
            heads_first = self.attention(self.norms[0](hidden)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*heads_first, is_causal=True)
            hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
            return hidden + self.perceptron(self.norms[1](hidden))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

        def forward(self, samples: Any) -> Any:
            places = torch.arange(samples.shape[1], device=samples.device)
            return self.head(self.norm(self.blocks(self.bytes(samples) + self.places(places))))

    torch.manual_seed(0)
    return GPT()


def train(steps: int = 150, width: int = 128, layers: int = 4, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train a GPT; every rank calls this function, each with its own samples.

    Args:
        steps: number of optimizer steps.
        width, layers: the network's width and number of layers.
        config: configuration for ``deepspeed.initialize``; by default the run's.

    Returns:
        On rank 0, a dict: ``losses`` (nats per byte, for every tenth step), ``loss`` on held-out text, ``written``
        (text that the network has written) and ``parameters`` (the number of parameters).
    """
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns of a function that DeepSpeed calls
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    from distributor import deepspeed_checkpoint, runtime

    deepspeed.init_distributed(verbose=False)
    model = gpt(width, layers)
    engine, *_ = deepspeed.initialize(model=model, config=config or runtime.deepspeed_config())
    samples = torch.frombuffer(bytearray(text()), dtype=torch.uint8)
    held_out, training = samples[: len(samples) // 20], samples[len(samples) // 20 :]
    generator = torch.Generator().manual_seed(dist.get_rank())

    def batch(source: Any, size: int) -> tuple[Any, Any]:
        starts = torch.randint(len(source) - CONTEXT, (size,), generator=generator)
        windows = torch.stack([source[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        return windows[:, :-1].to(engine.device), windows[:, 1:].to(engine.device)

    def loss_on(source: Any, size: int) -> Any:
        inputs, targets = batch(source, size)
        return functional.cross_entropy(engine(inputs).float().flatten(0, 1), targets.flatten())

    losses = []
    for step in range(steps):
        loss = loss_on(training, engine.train_micro_batch_size_per_gpu())
        engine.backward(loss)
        engine.step()
        if step % 10 == 0:
            losses.append(loss.item())
            if dist.get_rank() == 0 and step % 50 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
    with torch.no_grad():
        total = loss_on(held_out, 64)
        dist.all_reduce(total)
    weights = deepspeed_checkpoint.fp32_state_dict(engine)  # every rank takes part, rank 0 gets the weights
    if not weights:
        return {}
    plain = gpt(width, layers)
    plain.load_state_dict(weights)
    return {
        "losses": losses,
        "loss": total.item() / dist.get_world_size(),
        "written": write(plain, b"The ", 80),
        "parameters": sum(parameter.numel() for parameter in plain.parameters()),
    }


def write(model: Any, begin: bytes, count: int) -> str:
    """Return some bytes and the network's continuation of them. Only this process takes part."""
    import torch

    torch.manual_seed(0)
    known = torch.tensor([list(begin)])
    with torch.no_grad():
        for _ in range(count):
            likely = torch.softmax(model(known[:, -CONTEXT:])[0, -1] / 0.7, dim=0)
            known = torch.cat([known, torch.multinomial(likely, 1)[None]], dim=1)
    return bytes(known[0].tolist()).decode(errors="replace")


def script() -> None:
    """Train in a rank that runs this file as a script. Its arguments are DeepSpeed's and the script's own."""
    import json

    import deepspeed

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    args = deepspeed.add_config_arguments(parser).parse_args()
    with open(args.deepspeed_config) as file:
        found = train(args.steps, config=json.load(file))
    if found:
        print(f"held-out loss {found['loss']:.3f}; it writes: {found['written']!r}")


def main() -> None:
    """Train with the same configuration as a function and as a script."""
    from distributor import DeepspeedTorchDistributor, zero

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-gpus", type=int, default=2, help="number of ranks")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--master", help="Spark master; by default, train on this machine without Spark")
    parser.add_argument("--use-gpu", action="store_true")
    options = parser.parse_args()
    if options.master:
        from pyspark.sql import SparkSession

        SparkSession.builder.master(options.master).config("spark.ui.enabled", "false").getOrCreate()

    # On GPUs, bf16 and DeepSpeed's own Adam; on CPUs, fp32 (bf16 may be slow) and torch's Adam (nothing to compile).
    config = zero(
        3,
        precision="bf16" if options.use_gpu else "fp32",
        micro_batch_size=16,
        learning_rate=3e-3,
        torch_adam=not options.use_gpu,
    )
    distributor = DeepspeedTorchDistributor(
        options.num_gpus,
        localMode=not options.master,
        useGpu=options.use_gpu,
        deepspeedConfig=config,
        auto={"hidden_size": 128},
    )
    print("--- as a function")
    start = time.monotonic()
    found = distributor.run(train, options.steps)
    print(f"{found['parameters']:,} parameters, {options.steps} steps in {time.monotonic() - start:.1f} s")
    print(f"loss {found['losses'][0]:.3f} at first, {found['loss']:.3f} on held-out text in the end")
    print(f"it writes: {found['written']!r}")
    print("--- as a script")
    distributor.run(__file__, "--steps", options.steps)


if __name__ == "__main__":
    script() if "RANK" in os.environ else main()
