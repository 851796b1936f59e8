"""Compare steps per second and peak memory of DDP and ZeRO 1-3 under this package and DeepSpeed's own launcher.

    python benchmarks/deepspeed.py [--ranks 2] [--rounds 5] [--steps 60] [--json FILE]

Everything runs on this machine with the same model, data and number of threads. The two launchers take turns, and the
one that begins changes from round to round. Each run first makes ten steps that are not timed. On CPUs, the peak memory
is that of these ten steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# "import deepspeed" must not find this file.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from typing import Any  # noqa: E402

sys.path.insert(0, str(HERE.parent / "examples"))

from deepspeed_zero3 import CONTEXT, gpt  # noqa: E402

VARIANTS = ("ddp", "zero 1", "zero 2", "zero 3")

MICRO = 8


def config(stage: int, use_gpu: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "steps_per_print": 1_000_000,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "bf16": {"enabled": use_gpu},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000},
    }


def measure(variant: str, steps: int, width: int, layers: int) -> dict[str, float]:
    """Train in a rank, started by either launcher, and return its figures."""
    import logging
    import time
    import warnings

    warnings.filterwarnings("ignore")
    import deepspeed
    import psutil
    import torch
    from torch.nn import functional

    deepspeed.utils.logger.setLevel(logging.ERROR)
    use_gpu = torch.cuda.is_available()
    if use_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
    deepspeed.init_distributed(verbose=False)
    model = gpt(width, layers)
    if variant == "ddp":
        plain = torch.nn.parallel.DistributedDataParallel(model.to(device, torch.bfloat16 if use_gpu else None))
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
        forward = plain
    else:
        stage = int(variant[-1])
        forward, *_ = deepspeed.initialize(model=model, config=config(stage, use_gpu))
    samples = torch.randint(256, (MICRO, CONTEXT + 1), device=device)
    process, peak, start = psutil.Process(), 0, 0.0
    for step in range(-10, steps):
        if step == 0:
            torch.distributed.barrier()
            start = time.perf_counter()
        logits = forward(samples[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
        if variant == "ddp":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            forward.backward(loss)
            forward.step()
        if step < 0:  # only this process's own memory, without what it shares with the process that forked it
            peak = max(peak, process.memory_full_info().uss)
    if use_gpu:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    seconds = time.perf_counter() - start
    torch.distributed.destroy_process_group()  # otherwise a rank may abort at its end: "terminate called without ..."
    return {"steps/s": steps / seconds, "MiB": peak / 2**20}


def with_ours(variant: str, options: argparse.Namespace) -> dict[str, float]:
    from distributor import DeepspeedTorchDistributor

    distributor = DeepspeedTorchDistributor(
        options.ranks, 1, True, options.use_gpu, config(1, options.use_gpu), env=surroundings(options), logs="none"
    )
    found: dict[str, float] = distributor.run(measure, variant, options.steps, options.width, options.layers)
    return found


def with_deepspeeds_launcher(variant: str, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        shape = [str(options.steps), str(options.width), str(options.layers)]
        port = _free_port()  # by default, the port is always the same, so two runs would collide
        command = ["deepspeed", f"--master_port={port}", "--num_gpus", str(options.ranks), "--no_local_rank", __file__]
        env = {**os.environ, **surroundings(options)}
        if not options.use_gpu:
            env["DS_ACCELERATOR"] = "cpu"
        ended = subprocess.run(
            [Path(sys.executable).parent / command[0], *command[1:], "--rank", str(out), variant, *shape],
            env=env,
            capture_output=True,
            text=True,
        )
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink()
        if ended.returncode != 0:
            sys.exit(f"DeepSpeed's launcher ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
        found: dict[str, float] = json.loads(out.read_text())
        return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def surroundings(options: argparse.Namespace) -> dict[str, str]:
    """Return the same number of threads, and the same compiled extensions, for both launchers."""
    from distributor.launch.deepspeed.extensions import cache_folder

    threads = str(max(1, (os.cpu_count() or 1) // options.ranks))
    return {"OMP_NUM_THREADS": threads, "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", cache_folder())}


def main() -> None:
    if "--rank" in sys.argv:
        _, _, out, variant, *shape = sys.argv
        found = measure(variant, *map(int, shape))
        if os.environ["RANK"] == "0":
            Path(out).write_text(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    systems = {"here": with_ours, "deepspeed launcher": with_deepspeeds_launcher}
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        variant: {name: [] for name in systems} for variant in options.variants
    }
    for number in range(options.rounds):
        order = list(systems) if number % 2 == 0 else list(systems)[::-1]
        for variant in options.variants:
            for name in order:
                figures = systems[name](variant, options)
                found[variant][name].append(figures)
                print(f"round {number + 1}, {variant}, {name}: {figures['steps/s']:.2f} steps/s", flush=True)
    print(f"\n{'':8}  {'steps/s here':>14}  {'launcher':>10}  {'ratio':>6}  {'MiB here':>9}  {'launcher':>9}")
    for variant, runs in found.items():
        median = {
            name: {key: statistics.median(run[key] for run in each) for key in each[0]} for name, each in runs.items()
        }
        here, launcher = median["here"], median["deepspeed launcher"]
        ratio = here["steps/s"] / launcher["steps/s"]
        memory = f"{here['MiB']:9.0f}  {launcher['MiB']:9.0f}"
        print(f"{variant:8}  {here['steps/s']:14.2f}  {launcher['steps/s']:10.2f}  {ratio:6.3f}  {memory}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
