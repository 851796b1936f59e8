"""New files of ranks: their descriptions, and their names on the way to ``output_dir``."""

# Annotations are not postponed: messages contain entries, and their annotations are read at run time.

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from distributor.text.wording import size

#: Maximum number of bytes of the files in ``output_dir`` that are sent with a job. If there are more, nodes fetch them
#: from the driver.
WITH_THE_JOB = 64 << 20


@dataclass(frozen=True)
class Entry:
    """The description of a file of ranks.

    Attributes:
        path: its path in the ranks' current directory, with slashes.
        size: number of bytes.
        mode: its permissions.
        mtime_ns: when it was changed, in nanoseconds since the epoch.
        digest: sha256 of its content, in hex.
    """

    path: str
    size: int
    mode: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True)
class Brought:
    """A new file of ranks that reached the driver through Spark, because it could not be sent over the channel.

    Attributes:
        node: rank of the node that has sent the file.
        entry: the file.
        pieces: its content.
        uploaded: the name under which the node has uploaded the file to the run's URL; ``None`` if it has not.
    """

    node: int
    entry: Entry
    pieces: Sequence[bytes] = field(repr=False)
    uploaded: str | None = None


def incoming(path: str, node: int) -> str:
    """Return the temporary name of a node's file that has not arrived completely.

    >>> incoming("ckpt/a.pt", 1), is_incoming("ckpt/a.pt.node-1.part")
    ('ckpt/a.pt.node-1.part', True)
    """
    return f"{path}.node-{node}.part"


def is_incoming(name: str) -> bool:
    """Return whether a name is the temporary name of a file. Such files may remain if the driver ends early."""
    return re.search(r"\.node-\d+\.part(\.\d+)?$", name) is not None


def make_way(folder: str, name: str) -> str:
    """Return the path for a new file, after creating its folders and removing files that are in the way.

    Links are removed too, since they may lead to files that do not belong to this run.
    """
    at = folder
    for part in name.split("/")[:-1]:
        at = os.path.join(at, part)
        if os.path.islink(at) or os.path.isfile(at):
            os.unlink(at)
        os.makedirs(at, exist_ok=True)
    path = os.path.join(folder, name)
    if os.path.lexists(path):
        os.unlink(path)
    return path


def remove(folder: str, name: str) -> None:
    """Remove a file if it exists, and then its parent folders that are empty.

    Raises:
        OSError: the file cannot be removed.
    """
    path = os.path.join(folder, name)
    with suppress(FileNotFoundError):
        os.unlink(path)
    while (path := os.path.dirname(path)) != folder:
        try:
            os.rmdir(path)
        except OSError:  # the folder contains other files
            break


def beyond_limit(limit: int) -> str:
    """Return the reason for refusing a file: with it, all files together would have more than ``limit`` bytes."""
    return f"with it, new files would exceed output_limit ({size(limit)})"


def mark(run_id: str) -> str:
    """Return the name of the marker file. Nodes use it to recognize the driver's folder at a URL."""
    return f".distributor-{run_id}"


def own(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files that are the user's own, and not this package's.

    >>> own({"a.pt": 3, "b.pt.node-1.part": 1, ".distributor-3f2a": 0})
    {'a.pt': 3}
    """
    return {name: sizes[name] for name in sizes if not (is_incoming(name) or name.startswith(mark("")))}
