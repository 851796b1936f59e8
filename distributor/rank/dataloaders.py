"""Let the workers of DataLoaders end with their rank, and not at a SIGTERM to all processes of the node.

A machine that shuts down sends SIGTERM to each process. The rank goes on to the step at which all ranks stop, and needs
its workers until then; by default, a worker ends at any SIGTERM, and ends the rank with it. Source:
``torch/utils/data/_utils/signal_handling.py`` and ``worker.py``.
"""

from __future__ import annotations

import os
import signal
import sys
from types import ModuleType
from typing import Any

from distributor.machine.imports import on_import

_LONGEST = 107 - len("/listener-12345678")  # bytes of a folder in which multiprocessing names sockets: unix(7)


def keep_workers() -> None:
    """Shield the workers of all DataLoaders that this rank makes."""
    on_import("torch.utils.data._utils.signal_handling", _shield)
    on_import("torch.utils.data._utils.worker", _wrap)


def keep_sockets(folder: str, local_rank: int) -> None:
    """Let this rank and its workers make sockets in the node's folder, which is removed even if they are killed.

    ``multiprocessing`` would make a folder for each process, and remove it when the process ends by itself.
    """
    from multiprocessing import process

    path = os.path.join(folder, f"pymp-{local_rank}")
    if len(os.fsencode(path)) <= _LONGEST:
        os.makedirs(path, mode=0o700, exist_ok=True)
        process.current_process()._config["tempdir"] = path  # type: ignore[attr-defined]


def is_worker() -> bool:
    """Return whether this process is the worker of a DataLoader, which may just be starting."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    target = None if multiprocessing is None else getattr(multiprocessing.current_process(), "_target", None)
    return getattr(target, "__name__", "") == "_worker_loop"


def _shield(handling: ModuleType) -> None:
    torchs: Any = handling
    set_handlers, set_pids = torchs._set_worker_signal_handlers, torchs._set_worker_pids
    if hasattr(set_handlers, "shields"):
        return

    def in_worker() -> None:
        set_handlers()
        signal.signal(
            signal.SIGTERM, lambda *_: None
        )  # not SIG_IGN, which programs that the worker starts would inherit
        signal.siginterrupt(signal.SIGTERM, False)

    def in_rank(loader: int, pids: tuple[int, ...]) -> None:
        multiprocessing: Any = sys.modules["multiprocessing.process"]
        for worker in multiprocessing.active_children():
            if worker.pid in pids:  # the rank itself would end its workers by SIGTERM, too
                worker._popen.terminate = worker._popen.kill
        set_pids(loader, pids)

    in_worker.shields = True  # type: ignore[attr-defined]
    torchs._set_worker_signal_handlers, torchs._set_worker_pids = in_worker, in_rank


def _wrap(module: ModuleType) -> None:
    worker: Any = module
    if worker._worker_loop is not _worker_loop:
        worker._distributor_loop, worker._worker_loop = worker._worker_loop, _worker_loop


def _worker_loop(*arguments: Any) -> None:
    """Run torch's loop in a worker, which may be a new interpreter without the hooks of its rank."""
    keep_workers()
    from torch.utils.data._utils import worker

    worker._distributor_loop(*arguments)  # type: ignore[attr-defined]
