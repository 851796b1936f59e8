"""Tensors that seem to be on a GPU, and a CUDA that only notes which memory is pinned."""

from __future__ import annotations

import torch


class _OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(_OnGpu)


class FakeCuda:
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}  # sizes by address
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1 and address not in self.pinned
        self.calls += 1
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0
