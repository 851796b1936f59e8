"""Files that ranks write: their descriptions, and their names while they are copied to ``output_dir``."""

# This module does not postpone the evaluation of annotations, because the code that decodes messages reads the
# annotations of ``Entry`` at run time.

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from distributor.text.wording import size

#: Maximum total size, in bytes, of the files in ``output_dir`` that are sent to the nodes with a job. If the files are
#: larger, nodes fetch them from the driver.
WITH_THE_JOB = 64 << 20

#: Maximum number of bytes of a file's name on Linux.
_LONGEST = 255


@dataclass(frozen=True)
class Entry:
    """The description of a file that a rank has written.

    Attributes:
        path: the file's path relative to the ranks' current directory, with slashes.
        size: number of bytes.
        mode: the file's permissions.
        mtime_ns: when the file was last changed, in nanoseconds since the epoch.
        digest: SHA-256 of the file's content, in hexadecimal.
    """

    path: str
    size: int
    mode: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True)
class Brought:
    """A file that a rank wrote, and that reached the driver with the results of the Spark tasks.

    A node sends a file in this way if it cannot send it over the channel (its own connection to the driver).

    Attributes:
        node: rank of the node that has sent the file.
        entry: the description of the file.
        pieces: the content of the file.
        uploaded: the name under which the node has uploaded the file, if ``output_dir`` is a URL; otherwise ``None``.
    """

    node: int
    entry: Entry
    pieces: Sequence[bytes] = field(repr=False)
    uploaded: str | None = None


def fitted(path: str, end: str = "") -> str:
    """Return a path with ``end`` after its file name. If the name gets too long, a digest replaces its last characters.

    >>> fitted("ckpt/a.pt", ".part"), fitted("ckpt/" + 255 * "a", ".part")[-24:]
    ('ckpt/a.pt.part', 'aa~b0f3323e7a3cad8a.part')
    """
    folder, slash, name = path.rpartition("/")
    encoded = os.fsencode(name)
    if len(encoded) + len(end) > _LONGEST:
        end = f"~{hashlib.sha256(encoded).hexdigest()[:16]}{end}"
        name = encoded[: _LONGEST - len(end)].decode(errors="ignore")
    return f"{folder}{slash}{name}{end}"


def incoming(path: str, node: int, number: int | None = None) -> str:
    """Return the temporary name, in ``output_dir``, of a node's file that has not arrived completely.

    ``number`` tells apart several such files of one path and node.

    >>> incoming("ckpt/a.pt", 1), is_incoming("ckpt/a.pt.node-1.part")
    ('ckpt/a.pt.node-1.part', True)
    """
    return fitted(path, f".node-{node}.part{'' if number is None else f'.{number}'}")


def is_incoming(name: str) -> bool:
    """Return whether :func:`incoming` has made a name. Files with such names may remain if the driver ends early."""
    return re.search(r"\.node-\d+\.part(\.\d+)?$", name) is not None


def make_way(folder: str, name: str) -> str:
    """Return the path for a new file, after creating its folders and removing files that are in the way.

    Symbolic links on the path are removed too, since writing through a link could change a file outside ``folder``.
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
    """Return the reason why a file is refused: with this file, all files together would exceed ``limit`` bytes."""
    return f"with this file, the files in output_dir would exceed output_limit ({size(limit)})"


def mark(run_id: str) -> str:
    """Return the name of a file by which nodes check that a URL leads to the same ``output_dir`` as on the driver.

    If ``output_dir`` is a URL, the driver writes a file with this name to the URL, and each node looks for this file.
    """
    return f".distributor-{run_id}"


def own(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the user's files in ``output_dir``, without the files that this package puts there.

    >>> own({"a.pt": 3, "b.pt.node-1.part": 1, ".distributor-3f2a": 0})
    {'a.pt': 3}
    """
    return {name: sizes[name] for name in sizes if not (is_incoming(name) or name.startswith(mark("")))}
