"""When a process must not be forked."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributor.machine import forks

#: What tells of a library that it has started its threads: a module of it, and what stands in the module then.
STARTED: dict[str, tuple[str, Any, Any]] = {
    "JAX": (
        "jax._src.xla_bridge",
        SimpleNamespace(backends_are_initialized=lambda: True),
        SimpleNamespace(backends_are_initialized=lambda: False),
    ),
    "TensorFlow": (
        "tensorflow.python.eager.context",
        SimpleNamespace(_context=SimpleNamespace(_initialized=True)),
        SimpleNamespace(_context=None),
    ),
    "Ray": (
        "ray._private.worker",
        SimpleNamespace(global_worker=SimpleNamespace(connected=True)),
        SimpleNamespace(global_worker=SimpleNamespace(connected=False)),
    ),
}


@pytest.mark.parametrize("name", STARTED)
def test_a_library_that_has_started_is_told_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules are stand-ins; tests/frameworks has the libraries."""
    for module, _, imported in STARTED.values():
        monkeypatch.setitem(sys.modules, module, imported)
    assert forks._started_runtime() is None
    module, started, _ = STARTED[name]
    monkeypatch.setitem(sys.modules, module, started)
    assert forks._started_runtime() == name


def test_cuda_that_others_have_initialized_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's library is a stand-in, which answers as CUDA does before and after ``cuInit``."""
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda-stand-in.so"
    source.write_text("int answer = 3; int cuDeviceGetCount(int *count) { *count = 1; return answer; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    monkeypatch.setattr(forks, "_CUDA", str(library))
    assert not forks._is_cuda_initialized()  # nothing has loaded it
    loaded = ctypes.CDLL(str(library))
    assert not forks._is_cuda_initialized()
    ctypes.c_int.in_dll(loaded, "answer").value = 0
    assert forks._is_cuda_initialized()
