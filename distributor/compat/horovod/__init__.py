"""Horovod's launchers ``run`` and ``HorovodRunner``, and the module ``torch``, whose functions ranks call.

    from distributor.compat.horovod import HorovodRunner, run      # instead of: from sparkdl import HorovodRunner, ...
    from distributor.compat.horovod import torch as hvd            # instead of: import horovod.torch as hvd

Ranks communicate through ``torch.distributed``; Horovod need not be installed.
Source: https://horovod.readthedocs.io/en/stable/api.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributor.compat.horovod.runner import HorovodRunner as HorovodRunner
    from distributor.compat.horovod.spark import run as run

#: Modules that programs use as attributes, such as ``horovod.spark``, without importing them.
_MODULES = ("keras", "spark", "tensorflow", "torch")

_WHERE = {"HorovodRunner": "distributor.compat.horovod.runner", "run": "distributor.compat.horovod.spark"}

__all__ = ["HorovodRunner", "run"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
