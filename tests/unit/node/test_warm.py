"""When a warm process must not be forked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from distributor.node import warm

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
    assert warm._started_runtime() is None
    module, started, _ = STARTED[name]
    monkeypatch.setitem(sys.modules, module, started)
    assert warm._started_runtime() == name
