"""Check, before the target runs, that CUDA shows this rank the GPUs that it was promised.

CUDA is asked in a fork of the rank. In the rank itself, the question would initialize CUDA: the user's code could then
neither choose among the GPUs nor use them in processes that it forks.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

from distributor.errors import ResourceError
from distributor.machine import devices
from distributor.machine.processes import die_with_parent, readable, signal_name
from distributor.text.wording import count
from distributor.values.environment import CHECK_GPUS

_PATIENCE = 120.0  # seconds; CUDA is slow if a machine has many GPUs and no persistence daemon

_exit = os._exit


def check(through_torch: bool, local_rank: int = 0) -> None:
    """Raise ResourceError if CUDA shows fewer GPUs than promised. ``local_rank`` is unused; every such call gets it."""
    if (text := missing(through_torch)) is not None:
        raise ResourceError(text)


def missing(through_torch: bool) -> str | None:
    """Return the error text if CUDA does not show this process all GPUs that its visible-devices variable names."""
    promised = len(devices.parse_visible(devices.visible_devices(os.environ)) or ())
    if not promised or os.environ.get(CHECK_GPUS) == "0":
        return None
    try:
        seen, reason = in_fork(_ask_torch if through_torch else _ask_driver)
    except RuntimeError as error:
        seen, reason = 0, str(error)
    if seen is None or seen >= promised:
        return None
    said = ", ".join(filter(None, [devices.described(os.environ, devices.list_gpus()), reason]))
    return (
        f"use_gpu=True, but {'torch' if through_torch else 'CUDA'} sees {seen} of {count(promised, 'GPU')} ({said}): "
        f"correct CUDA_VISIBLE_DEVICES, the driver{' or torch' if through_torch else ''} there, or pass use_gpu=False "
        "to train on CPUs"
    )


def in_fork(ask: Callable[[], Any]) -> Any:
    """Return what a function returns in a fork of this process, as plain values. RuntimeError if it raises or dies."""
    here, there = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            os.write(there, json.dumps(_answer(ask)).encode())
        finally:
            _exit(0)
    os.close(there)
    try:
        if not readable([here], _PATIENCE):
            os.kill(pid, signal.SIGKILL)  # and do not wait: a process that hangs in a driver may not even end then
            raise RuntimeError(f"CUDA did not answer within {_PATIENCE:g} s")
        answer = os.read(here, 1 << 16)
    finally:
        os.close(here)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not answer:
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"exited with code {status}"
        raise RuntimeError(f"the process that asked CUDA {how}")
    value, error = json.loads(answer)
    if error is not None:
        raise RuntimeError(error)
    return value


def _answer(ask: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return ask(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:1000]


def _ask_torch() -> tuple[int, str]:
    """Return how many GPUs torch can use, and the reason if torch gives one."""
    import torch

    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # NVML also lists GPUs that CUDA cannot use
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        # torch.cuda.device_count() asks NVML first.
        counted = getattr(torch._C, "_cuda_getDeviceCount", torch.cuda.device_count)
        seen = counted() if torch.cuda.is_available() else 0
    if not seen and torch.version.cuda is None and torch.version.hip is None:
        return seen, f"torch {torch.__version__} is built for CPUs"
    return seen, " ".join(str(warned[0].message).split()) if warned else ""


def _ask_driver() -> tuple[int | None, str]:
    """Return how many GPUs NVIDIA's driver shows, and the reason for an error. ``None`` if the GPUs are AMD's.

    Source: https://docs.nvidia.com/cuda/cuda-driver-api/ (cuInit, cuDeviceGetCount, cuGetErrorName)
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None if devices.has_amd() else 0, "there is no CUDA driver (libcuda.so.1)"
    seen, name = ctypes.c_int(), ctypes.c_char_p()
    error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(seen))
    if not error:
        return seen.value, ""
    cuda.cuGetErrorName(error, ctypes.byref(name))
    return 0, f"CUDA's driver reports {(name.value or str(error).encode()).decode()}"
