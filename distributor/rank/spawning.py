"""Warn about code that starts its own training processes. In a rank, such processes may wait for each other in vain.

Many scripts call ``torch.multiprocessing.spawn`` with a function that joins a process group. These processes inherit
the rank's environment, which says that another process serves the rendezvous, so all of them wait for half an hour.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from distributor.machine.imports import on_import


def watch(rank: int) -> None:
    """Print a warning if this rank is rank 0 and ever starts processes with ``torch.multiprocessing``."""
    if rank == 0:
        on_import("torch.multiprocessing.spawn", _watch_processes)


def _watch_processes(module: Any) -> None:
    """Wrap the constructor of ``ProcessContext``, not ``spawn``, so that none of our frames stays on the stack."""
    context = module.ProcessContext
    begin = context.__init__

    @wraps(begin)
    def begin_and_note(this: Any, *args: Any, **kwargs: Any) -> None:
        begin(this, *args, **kwargs)
        context.__init__ = begin  # one warning is enough
        print(
            "[distributor] the code starts processes with torch.multiprocessing in each rank. If they are training "
            "processes, they may wait for each other in vain: the ranks of this run are the training processes. Let "
            'each rank call the training function directly, with int(os.environ["RANK"]) as its first argument',
            file=sys.stderr,
        )

    context.__init__ = begin_and_note
