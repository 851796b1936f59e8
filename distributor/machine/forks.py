"""Whether what a process has imported survives a fork."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

_CUDA = "libcuda.so.1"  # the driver's interface

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def what_breaks() -> str | None:
    """Return what a module has done that breaks in forks, and why; ``None`` if this process may be forked."""
    # Only Python threads count. OpenBLAS and OpenMP start threads when they are loaded, but handle forks themselves.
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"starts threads ({', '.join(threads)}), which do not survive a fork"
    if _is_bad_fork():
        return "uses a GPU, so forked ranks could not use it"
    runtime = _started_runtime()
    return f"uses {runtime}, whose threads do not survive a fork" if runtime is not None else None


def _is_bad_fork() -> bool:
    """Return whether forks cannot use GPUs, for example because CUDA was initialized."""
    if _is_cuda_initialized():
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(int(sys.modules["torch"].cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


def _is_cuda_initialized() -> bool:
    """Ask CUDA's driver, if anything has loaded it: torch knows of its own calls only."""
    try:
        driver = ctypes.CDLL(_CUDA, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALIZED


def _started_runtime() -> str | None:
    """Return which library has started native threads, which Python does not list; ``None`` if none has.

    They start such threads at their first use, not when imported. Sources: ``jax/_src/xla_bridge.py``,
    ``tensorflow/python/eager/context.py``, ``ray/_private/worker.py``.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and bridge.backends_are_initialized():
        return "JAX"
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if context is not None and context._initialized:
        return "TensorFlow"
    worker = getattr(sys.modules.get("ray._private.worker"), "global_worker", None)
    return "Ray" if worker is not None and worker.connected else None
