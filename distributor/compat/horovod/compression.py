"""How tensors are sent: unchanged, or as 16-bit numbers. Source: https://horovod.readthedocs.io/en/stable/api.html."""

from __future__ import annotations

from typing import ClassVar

import torch


class Compressor:
    """A way to make a tensor smaller before it is sent. This base class leaves the tensor unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor to send, and the type that :meth:`decompress` restores."""
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that was received, converted back to its original type."""
        return tensor.to(dtype)


class Half(Compressor):
    """A compressor that sends floating-point tensors as ``float16``, and other tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor to send and its original type. A floating-point tensor is sent as ``float16``."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype


class Compression:
    """The ways to compress tensors: ``Compression.none`` and ``Compression.fp16``."""

    none: ClassVar[type[Compressor]] = Compressor
    fp16: ClassVar[type[Compressor]] = Half
