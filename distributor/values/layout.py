"""What lies where in a node's private folder: what its agent, its launcher and its ranks leave for each other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from distributor.values.job import Script

#: On these signals a rank writes Python stacks, of all its threads or of its main thread. Users' code has uses of its
#: own for SIGUSR1.
ALL_STACKS_SIGNAL = signal.SIGRTMIN + 10


MAIN_STACK_SIGNAL = signal.SIGRTMIN + 11


#: The folder of a node.
Folder = str | os.PathLike[str]


def order(folder: Folder) -> Path:
    """The pickled :class:`~distributor.values.plan.NodeOrder`, for the launcher and for ranks that are started anew."""
    return Path(folder, "order.pickle")


def launcher_log(folder: Folder) -> Path:
    """What the launcher has to say."""
    return Path(folder, "launcher.log")


def rank_log(folder: Folder, local_rank: int, stream: str) -> Path:
    """Where a rank's ``"stdout"`` or ``"stderr"`` goes, or what Python prints of its ``"uncaught"`` exception."""
    return Path(folder, f"rank-{local_rank}.{stream}")


def stacks(folder: Folder, local_rank: int) -> Path:
    """Where a rank writes its stacks."""
    return Path(folder, f"rank-{local_rank}.stacks")


def outcome(folder: Folder, local_rank: int) -> Path:
    """Where a rank leaves its pickled :class:`~distributor.values.outcome.Outcome`."""
    return Path(folder, f"rank-{local_rank}.outcome")


def value(folder: Folder, rank: int) -> Path:
    """Where a rank leaves its pickled return value."""
    return Path(folder, f"value-{rank}.pickle")


def working_dir(folder: Folder) -> Path:
    """A project folder that was shipped."""
    return Path(folder, "working_dir")


def script(folder: Folder, script: Script) -> Path:
    """The copy of a script that was shipped."""
    return Path(folder, "script", os.path.basename(script.path))
