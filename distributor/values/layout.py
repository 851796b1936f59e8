"""Paths in a node's private folder, through whose files its agent, launcher and ranks communicate."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from distributor.values.job import Script

#: Beginning of the folders' names in the temporary directory, and the file in each that its owner keeps locked.
PREFIX, OWNER = "distributor-", "owner"

#: Make a rank write the stacks of all its threads, or of its main thread. SIGUSR1 stays free for users' code.
ALL_STACKS_SIGNAL = signal.SIGRTMIN + 10


MAIN_STACK_SIGNAL = signal.SIGRTMIN + 11

#: Make a launcher stop its ranks, with SIGTERM or, if the agent ends them itself, without. SIGTERM itself also
#: comes from outside, to all processes of a machine that shuts down.
STOP_SIGNAL = signal.SIGRTMIN + 13


FAST_KILL_SIGNAL = signal.SIGRTMIN + 12


#: A rank's streams, numbered from 1; "uncaught" is what Python prints for an uncaught exception.
STREAMS = ("stdout", "stderr", "uncaught", "reports")

#: The node's copy of the project folder, the folder of its copy of a script, and the pickled call.
WORKING_DIR, SCRIPT, CALL = "working_dir", "script", "call"

#: The file that has the path of a run's ``output_dir``, for other runs whose ranks run in a folder around it.
OUTPUT_DIR = "output_dir"

Folder = str | os.PathLike[str]


def order(folder: Folder) -> Path:
    """Return the path of the pickled ``NodeOrder``, which ranks read too if they are not forks of the launcher."""
    return Path(folder, "order.pickle")


def launcher_log(folder: Folder) -> Path:
    """Return the path of the launcher's output."""
    return Path(folder, "launcher.log")


def companion_order(folder: Folder, name: str) -> Path:
    """Return the path of a companion's pickled ``CompanionOrder``."""
    return Path(folder, f"companion-{name}.pickle")


def companion_log(folder: Folder, name: str) -> Path:
    """Return the path of a companion's output."""
    return Path(folder, f"companion-{name}.log")


def rank_log(folder: Folder, local_rank: int, stream: str) -> Path:
    """Return the path of one of a rank's :data:`STREAMS`."""
    return Path(folder, f"rank-{local_rank}.{stream}")


def stacks(folder: Folder, local_rank: int) -> Path:
    """Return the path of the file to which a rank writes its stacks."""
    return Path(folder, f"rank-{local_rank}.stacks")


def vote_file(folder: Folder) -> Path:
    """Return the path of the :class:`~distributor.stopping.vote_file.VoteFile` of the node's ranks and agent."""
    return Path(folder, "votes")


def value(folder: Folder, rank: int) -> Path:
    """Return the path of a rank's pickled return value."""
    return Path(folder, f"value-{rank}.pickle")


def error(folder: Folder, local_rank: int) -> Path:
    """Return the path of the file that torch's decorator ``@record`` writes if the rank fails."""
    return Path(folder, f"error-{local_rank}.json")


def working_dir(folder: Folder) -> Path:
    """Return the path of the node's copy of the project folder or, without one, of a new current directory."""
    return Path(folder, WORKING_DIR)


def call(folder: Folder) -> Path:
    """Return the path of the pickled call, which ranks map and never change."""
    return Path(folder, CALL)


def script(folder: Folder, script: Script) -> Path:
    """Return the path of the node's copy of a script."""
    return Path(folder, SCRIPT, os.path.basename(script.path))
