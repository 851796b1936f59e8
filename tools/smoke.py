"""Smoke test of a new environment: ranks, their output, a failure, and the import of DeepSpeed in ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from distributor import TorchDistributor, TrainingError


def total() -> float:
    """Print a line, and return the sum of one number from each rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    print("rank", dist.get_rank(), "has met the others")
    return tensor.item()


def fail() -> None:
    """Fail on one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("learning rate must be positive")
    dist.barrier()


def deepspeed_version() -> str:
    """Return the version of DeepSpeed that a rank imports."""
    import deepspeed

    return str(deepspeed.__version__)


def main() -> None:
    """Run all checks with two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run = TorchDistributor(2, local_mode=True, use_gpu=False, log_dir=folder).submit(total)
        assert run.results() == [3.0, 3.0]
        lines = [Path(folder, run.id, f"rank-{rank}.stdout").read_text() for rank in range(2)]
    assert lines == ["rank 0 has met the others\n", "rank 1 has met the others\n"], lines
    distributor = TorchDistributor(2, local_mode=True, use_gpu=False)
    try:
        distributor.run(fail)
    except TrainingError as error:
        assert error.rank == 1
        assert isinstance(error.__cause__, ValueError)
    else:
        raise AssertionError("the run has not failed")
    print("DeepSpeed", distributor.run(deepspeed_version))


if __name__ == "__main__":
    main()
