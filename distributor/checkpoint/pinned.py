"""Memory that CUDA has pinned: copies from GPUs go there directly, and not through CUDA's own buffers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs


class Pinned:
    """The memory of a tensor on the CPU, pinned until :meth:`release`. If CUDA refuses, copies are only slower.

    torch's own ``pin_memory`` rounds sizes up to powers of two, and cannot pin a file that is mapped.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block  # must not be freed before
        cudart: Callable[[], Any] = torch.cuda.cudart
        self._cuda = cudart()
        storage = block.untyped_storage()
        self._address = storage.data_ptr()
        self._held = int(self._cuda.cudaHostRegister(self._address, storage.nbytes(), _PORTABLE)) == 0
        if not self._held:
            with suppress(RuntimeError):  # CUDA remembers the error, and torch raises it at the next kernel
                torch.ones(1, device="cuda")

    def __del__(self) -> None:  # before the memory: another block at its address could not be pinned
        with suppress(Exception):
            self.release()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._cuda.cudaHostUnregister(self._address)
