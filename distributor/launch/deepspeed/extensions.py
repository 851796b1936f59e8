"""DeepSpeed's C++ and CUDA extensions: a rank builds them once per node, before training, or reports why it cannot.

With torch's lock, a file, other processes wait forever if the one that builds is killed
(``torch/utils/file_baton.py``). The kernel's lock, used instead, goes with its process, and they wait a limited time.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from distributor.errors import StartError
from distributor.machine import devices, folders, versions

_LOOK = 0.05  # seconds between looks whether another process has finished its build
_PATIENCE = 2.0  # seconds until a rank says that it is waiting
_ATTEMPTS = 3  # to load an extension

#: By the name of the builder.
_ADVICE = {
    "AsyncIOBuilder": "offloading to NVMe needs libaio and its headers (apt-get install libaio-dev, or add their "
    "folders to CFLAGS and LDFLAGS)",
    "CPUAdamBuilder": 'an optimizer with "torch_adam": true does not need it, but is slow when offloaded',
    "FusedAdamBuilder": 'an optimizer with "torch_adam": true needs no extension',
}


def load(names: Sequence[str], timeout: float, local_rank: int) -> None:
    """Load extensions, by the names of their builders; StartError says what is missing or has failed.

    The first rank of a node builds what does not exist yet. The others wait for it, for ``timeout`` seconds at most.
    """
    _find_ninja()
    _set_baton(timeout)  # also for extensions that this process loads later
    if not names:
        _set_cache_folder(_gpus_without_cuda)
        return
    try:
        from deepspeed.accelerator import get_accelerator
        from deepspeed.git_version_info import installed_ops
    except ImportError as error:
        raise StartError(
            f"there is a deepspeedConfig, but {sys.executable} cannot import deepspeed ({error}): install it in the "
            "Python of the executors (pip install deepspeed)"
        ) from error
    accelerator = get_accelerator()
    accelerator.set_device(local_rank)  # otherwise, querying a GPU would allocate memory on GPU 0
    _set_cache_folder(_gpus)
    for name in names:
        builder = accelerator.create_op_builder(name)
        if builder is None or type(builder).__name__ == "NotImplementedBuilder":
            raise StartError(
                f"the deepspeedConfig needs DeepSpeed's {name.removesuffix('Builder')}, which does not exist for "
                f"{accelerator.device_name()!r} devices{_advice(name)}"
            )
        if not installed_ops.get(builder.name, False):
            missing = missing_tool(_needs_cuda(builder))
            if missing is not None:
                raise StartError(f"DeepSpeed compiles its {builder.name} on first use, but {missing}{_advice(name)}")
            if not builder.is_compatible(verbose=False):
                reason = builder.error_log or "something that it needs is missing on this machine"
                raise StartError(f"DeepSpeed cannot build its {builder.name}: {reason}{_advice(name)}")
        try:
            _build(builder)
        except Exception as error:
            text = f"DeepSpeed cannot load its {builder.name}: {type(error).__name__}: {error}"
            raise StartError(f"{text}{_advice(name)}") from error


def _build(builder: Any) -> None:
    """Load an extension, again if another process has ended while it built it."""
    for _ in range(_ATTEMPTS - 1):
        try:
            builder.load(verbose=False)
            return
        except ImportError:
            tools = importlib.import_module("torch.utils.cpp_extension")
            tools.JIT_EXTENSION_VERSIONER.entries.pop(builder.name, None)  # otherwise, torch would skip the next build
    builder.load(verbose=False)


def missing_tool(cuda: bool) -> str | None:
    """Return which tool a build lacks on this machine, and how to get it, if any."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which((shlex.split(compiler) or [""])[0]) is None:  # CXX may be "ccache g++"
        named = "CXX names it" if "CXX" in os.environ else "or set CXX to another"
        return f"there is no C++ compiler {compiler!r} on the PATH (apt-get install g++; {named})"
    if shutil.which("ninja") is None:
        return "there is no 'ninja' on the PATH (pip install ninja)"
    if cuda:
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None or shutil.which(os.path.join(CUDA_HOME, "bin", "nvcc")) is None:
            return (
                f"there is no nvcc in {CUDA_HOME or 'the usual folders'} (install the CUDA toolkit of the version that "
                "torch was built with, and set CUDA_HOME to its folder)"
            )
    return None


def _set_cache_folder(gpus: Callable[[], str]) -> None:
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = cache_folder(gpus())


def _gpus() -> str:
    """Return the CUDA version and the compute capabilities of the GPUs that this process sees."""
    import torch

    if not torch.cuda.is_available():
        return ""
    kinds = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return f"{torch.version.cuda} {sorted(kinds)}"


def _gpus_without_cuda() -> str:
    """Return the same as :func:`_gpus`, but do not initialize CUDA, which is left to the user's code.

    Afterwards, a process cannot choose its GPUs and its forks can use none. NVML may number GPUs in another order: with
    several types, the text has all of them, and ``CUDA_VISIBLE_DEVICES``. AMD's GPUs have no NVML.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    kinds = [] if devices.parse_visible(visible) == () else sorted(_ask_nvml())
    with suppress(ImportError):  # whoever needs torch says so
        import torch

        if kinds and torch.version.cuda is not None:
            return f"{torch.version.cuda} {kinds}" + (f" {visible}" if len(kinds) > 1 else "")
    return ""


def _ask_nvml() -> set[tuple[int, int]]:
    """Return the compute capabilities of all NVIDIA GPUs here. Source: https://docs.nvidia.com/deploy/nvml-api/"""
    count, device, major, minor = ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    capabilities = set()
    with suppress(OSError, AttributeError):  # there is no NVML, or it does not have these functions
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            for index in range(count.value):
                if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                    continue
                if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                    capabilities.add((major.value, minor.value))
            nvml.nvmlShutdown()
    return capabilities


def cache_folder(gpus: str = "") -> str:
    """Return the folder where this node keeps built extensions between runs; StartError if none can be used.

    Machines may share a home folder, so each processor, kind of GPUs and set of versions has its own. So has a Python
    environment: a second one would find torch's headers elsewhere, and compile again while ranks of the first use it.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    specs = (importlib.util.find_spec(name) for name in ("torch", "deepspeed"))
    places = [str(spec.origin) for spec in specs if spec is not None]
    kinds = [*places, str(versions.here(["deepspeed"])), _processor(), gpus, os.environ.get("TORCH_CUDA_ARCH_LIST", "")]
    digest = hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:12]
    name = f"py{sys.version_info.major}{sys.version_info.minor}-{digest}"
    parents: tuple[Callable[[], str], ...] = (lambda: os.path.join(home, "distributor"), _private_parent)
    for parent in parents:
        folder = os.path.join(parent(), "torch_extensions", name)
        with suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    raise StartError(
        f"compiled extensions can be kept neither in {home} nor in the temporary directory: set TORCH_EXTENSIONS_DIR "
        "to a folder to which ranks can write"
    )


def _private_parent() -> str:
    """Return a private folder in the temporary directory; StartError if another user has created it."""
    folder = os.path.join(tempfile.gettempdir(), f"distributor_cache_{os.geteuid()}")
    try:
        folders.make_private(folder)
    except PermissionError as error:
        raise StartError(f"{error}: remove this folder, or set TORCH_EXTENSIONS_DIR to another one") from error
    return folder


def _processor() -> str:
    """Return the architecture and the instruction set of this machine."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return f"{platform.machine()} {line}"
    return platform.machine()


def _find_ninja() -> None:
    """Add the folder of Python's program to the PATH if only this folder has ninja, which builds need."""
    if shutil.which("ninja") is None:
        beside = os.path.dirname(sys.executable)
        if shutil.which("ninja", path=beside) is not None:
            os.environ["PATH"] = os.pathsep.join([*filter(None, [os.environ.get("PATH")]), beside])


def _needs_cuda(builder: Any) -> bool:
    import torch
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    return isinstance(builder, CUDAOpBuilder) and torch.cuda.is_available()


def _advice(name: str) -> str:
    return f"; {_ADVICE[name]}" if name in _ADVICE else ""


def _set_baton(timeout: float) -> None:
    """In this process, replace ``FileBaton``, torch's lock for builds."""

    def make(path: str, *_: Any, **__: Any) -> Baton:
        return Baton(path, timeout)

    with suppress(ImportError):  # torch's module needs setuptools, which may be missing where nothing is built
        module = importlib.import_module("torch.utils.cpp_extension")
        if hasattr(module, "FileBaton"):
            module.FileBaton = make  # type: ignore[attr-defined]


class Baton:
    """A lock to build an extension, with the members of torch's ``FileBaton``; ``path`` is torch's lock file."""

    def __init__(self, path: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._name = os.path.basename(os.path.dirname(path))
        self._timeout = timeout
        self._clock = clock
        self._lock: int | None = None

    def try_acquire(self) -> bool:
        self._lock = self._try(fcntl.LOCK_EX)
        if self._lock is None:
            return False
        if not any(name.endswith(".so") for name in os.listdir(os.path.dirname(self._path))):
            print(
                f"[distributor] building {self._name} for this node, once; this takes up to a few minutes",
                file=sys.stderr,
            )
        return True

    def wait(self) -> None:
        """Wait until no process builds the extension; TimeoutError if one builds for too long."""
        start, shown = self._clock(), False
        while (lock := self._try(fcntl.LOCK_SH)) is None:
            waited = self._clock() - start
            if waited > _PATIENCE and not shown:
                shown = True
                print(f"[distributor] waiting for another process to build {self._name}", file=sys.stderr)
            if waited > self._timeout:
                raise TimeoutError(
                    f"another process has been building in {os.path.dirname(self._path)} for {self._timeout:g} s: wait "
                    "for it, or pass a longer extensions_timeout="
                )
            time.sleep(_LOOK)
        os.close(lock)

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _try(self, kind: int) -> int | None:
        lock = os.open(f"{self._path}.kernel", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock
