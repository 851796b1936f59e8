"""Paths in a node's private folder. The node's agent, launcher and ranks use this folder's files to communicate."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from distributor.values.job import Script

#: The beginning of the names of private folders in the temporary directory, and the file in such a folder that its
#: owner keeps locked.
PREFIX, OWNER = "distributor-", "owner"

#: Signals that make a rank write the Python stacks of all its threads, or of its main thread only. SIGUSR1 stays free
#: for users' code.
ALL_STACKS_SIGNAL = signal.SIGRTMIN + 10


MAIN_STACK_SIGNAL = signal.SIGRTMIN + 11

#: Signals from an agent to its launcher: stop the ranks, with SIGTERM or, if the agent ends them itself, without.
#: SIGTERM itself also comes from outside, to all processes of a machine that shuts down.
STOP_SIGNAL = signal.SIGRTMIN + 13


HURRY_SIGNAL = signal.SIGRTMIN + 12


#: The streams of a rank, numbered from 1. The third contains what Python prints for an uncaught exception. The fourth
#: contains what the rank passes to ``runtime.report``, which is not shown as output.
STREAMS = ("stdout", "stderr", "uncaught", "reports")

#: The name of the node's copy of the project folder (see :func:`working_dir`), and the name of the folder for the
#: node's copy of a script.
WORKING_DIR, SCRIPT = "working_dir", "script"

#: A node's private folder.
Folder = str | os.PathLike[str]


def order(folder: Folder) -> Path:
    """Return the path of the pickled :class:`~distributor.values.plan.NodeOrder`, which says which ranks to start.

    The launcher reads this file. Ranks read it too if they are new processes and not forks of the launcher.
    """
    return Path(folder, "order.pickle")


def launcher_log(folder: Folder) -> Path:
    """Return the path of the file with the output of the launcher (the process that starts the ranks)."""
    return Path(folder, "launcher.log")


def companion_order(folder: Folder, name: str) -> Path:
    """Return the path of the pickled :class:`~distributor.values.plan.CompanionOrder` for a companion.

    A companion is a process that runs beside the ranks, such as Ray.
    """
    return Path(folder, f"companion-{name}.pickle")


def companion_log(folder: Folder, name: str) -> Path:
    """Return the path of the file with the output of a companion (a process beside the ranks, such as Ray)."""
    return Path(folder, f"companion-{name}.log")


def rank_log(folder: Folder, local_rank: int, stream: str) -> Path:
    """Return the path of the file for one stream of a rank, such as ``"stdout"``; see :data:`STREAMS`."""
    return Path(folder, f"rank-{local_rank}.{stream}")


def stacks(folder: Folder, local_rank: int) -> Path:
    """Return the path of the file to which a rank writes the Python stacks of its threads."""
    return Path(folder, f"rank-{local_rank}.stacks")


def board(folder: Folder) -> Path:
    """Return the path of the :class:`~distributor.stopping.board.Board` (a file that the node's processes share).

    Through the board, the node's ranks and their agent agree on a step at which all ranks stop.
    """
    return Path(folder, "board")


def value(folder: Folder, rank: int) -> Path:
    """Return the path of a rank's pickled return value."""
    return Path(folder, f"value-{rank}.pickle")


def error(folder: Folder, local_rank: int) -> Path:
    """Return the path of the file that torch's decorator ``@record`` writes if the rank fails."""
    return Path(folder, f"error-{local_rank}.json")


def working_dir(folder: Folder) -> Path:
    """Return the path of the node's copy of the project folder.

    Without a project folder, a new folder at this path may become the ranks' current directory.
    """
    return Path(folder, WORKING_DIR)


def script(folder: Folder, script: Script) -> Path:
    """Return the path of the node's copy of a script."""
    return Path(folder, SCRIPT, os.path.basename(script.path))
