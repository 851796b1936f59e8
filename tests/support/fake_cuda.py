"""A torch with GPUs that are none: ``FAKE_GPUS`` of them. Preloaded, it is what ranks find."""

import os

import torch

_cuda = torch.cuda


def _count() -> int:
    """Notes which process has asked, as CUDA would then be initialized there."""
    if "FAKE_GPUS_ASKED" in os.environ:
        with open(os.environ["FAKE_GPUS_ASKED"], "a") as file:
            print(os.getpid(), file=file)
    return int(os.environ["FAKE_GPUS"])


_cuda.device_count = _count
_cuda.is_available = lambda: _count() > 0
