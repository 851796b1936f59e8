"""New files of ranks, as they travel to the driver."""

# Messages hold entries, whose annotations are read at run time.

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from distributor.text.wording import size

#: Most bytes of files of earlier runs that travel with a job. With more, each node asks the driver for them.
WITH_THE_JOB = 64 << 20


@dataclass(frozen=True)
class Entry:
    """A file of ranks.

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
    """A file that came through Spark.

    Attributes:
        node: rank of the node that brings it.
        entry: the file.
        pieces: its content.
        uploaded: the name under which the node has written it to the run's URL; ``None`` if it has not.
    """

    node: int
    entry: Entry
    pieces: Sequence[bytes] = field(repr=False)
    uploaded: str | None = None


def incoming(path: str, node: int) -> str:
    """Return the name under which a file of a node comes, before it gets its own.

    >>> incoming("ckpt/a.pt", 1), is_incoming("ckpt/a.pt.node-1.part")
    ('ckpt/a.pt.node-1.part', True)
    """
    return f"{path}.node-{node}.part"


def is_incoming(name: str) -> bool:
    """Return whether a file has come in part only: the driver's end may leave such files."""
    return re.search(r"\.node-\d+\.part(\.\d+)?$", name) is not None


def make_way(folder: str, name: str) -> str:
    """Make the folders of a file, in place of links and files, and remove what has its name. Return its path.

    Links in ``folder`` may lead to files that are not this run's.
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
    """Remove a file, if it is there, and the folders around it that are empty then.

    Raises:
        OSError: it cannot be removed.
    """
    path = os.path.join(folder, name)
    with suppress(FileNotFoundError):
        os.unlink(path)
    while (path := os.path.dirname(path)) != folder:
        try:
            os.rmdir(path)
        except OSError:  # it holds other files
            break


def beyond_limit(limit: int) -> str:
    """Return why a file is not kept that would exceed the limit on all files, in bytes."""
    return f"with it, new files would have more than output_limit, {size(limit)}"


def mark(run_id: str) -> str:
    """Return the name of the file by which nodes know the driver's place behind a URL."""
    return f".distributor-{run_id}"


def own(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files that are the user's own, and not this package's.

    >>> own({"a.pt": 3, "b.pt.node-1.part": 1, ".distributor-3f2a": 0})
    {'a.pt': 3}
    """
    return {name: sizes[name] for name in sizes if not (is_incoming(name) or name.startswith(mark("")))}
