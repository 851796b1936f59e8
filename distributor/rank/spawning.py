"""Tell of code that starts its training processes by itself: under a launcher, they wait for each other in vain.

Many scripts call ``torch.multiprocessing.spawn`` with a function that joins a process group. Their processes inherit
the environment of the rank, which says that another process serves the rendezvous. So nobody does, and they wait for
half an hour.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from distributor.rank.imports import on_import


def watch(rank: int) -> None:
    """Print a note if rank 0 ever starts processes with ``torch.multiprocessing``."""
    if rank == 0:
        on_import("torch.multiprocessing.spawn", _watch_processes)


def _watch_processes(module: Any) -> None:
    """Look at the handle on such processes, which is made right after them: no frame of ours stays in the stack."""
    context = module.ProcessContext
    begin = context.__init__

    @wraps(begin)
    def begin_and_note(this: Any, *args: Any, **kwargs: Any) -> None:
        begin(this, *args, **kwargs)
        context.__init__ = begin  # once is enough
        print(
            "[distributor] the code starts processes with torch.multiprocessing, in each rank. If they are to train, "
            "they may wait for each other in vain, since the run has started its ranks for that: let each rank call "
            'their function itself, with int(os.environ["RANK"]) as its first argument',
            file=sys.stderr,
        )

    context.__init__ = begin_and_note
