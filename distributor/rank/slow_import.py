"""Notes when a rank has imported ``torch._dynamo``, so that the spare does so before the next attempt needs it.

The first optimizer or DistributedDataParallel imports it, which takes a second or more. The import reads 276
environment variables and the current directory, which a function may change before. Where it has not, neither will it
in the next attempt.
"""

from __future__ import annotations

import importlib
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

from distributor.machine.imports import around_import, uncollected

_MODULE = "torch._dynamo"


def watch(imported: mmap.mmap | None, local_rank: int) -> None:
    """Import the module quickly once user code needs it, and note it in the rank's byte if nothing has changed."""
    before, rank = _surroundings(), os.getpid()

    @contextmanager
    def noted(_: ModuleType) -> Iterator[None]:
        is_alike = os.getpid() == rank and _surroundings() == before  # the import itself sets variables
        with uncollected():
            yield
        if is_alike and imported is not None:
            imported[local_rank] = 1

    around_import(_MODULE, noted)


def _surroundings() -> tuple[dict[str, str], str | None]:
    try:
        return dict(os.environ), os.getcwd()
    except OSError:  # the directory is gone
        return dict(os.environ), None


def is_loaded() -> bool:
    """Return whether this process, and so its forks, need not import the module, as after ``preload=``."""
    return _MODULE in sys.modules


def by_all(imported: mmap.mmap) -> bool:
    """Return whether all ranks of the node have imported the module."""
    return all(imported[:])


def repeat(environ: Mapping[str, str], cwd: str | None, path: Sequence[str]) -> None:
    """Import the module as a rank would that has this environment, current directory and module path."""
    os.environ.clear()
    os.environ.update(environ)
    here, sys_path = os.getcwd(), list(sys.path)
    os.chdir(cwd or here)
    sys.path[:] = path
    try:
        with uncollected():
            importlib.import_module(_MODULE)
    finally:
        os.chdir(here)
        sys.path[:] = sys_path
