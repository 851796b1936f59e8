"""Files that ranks write: their descriptions, and their names while they are copied to ``output_dir``."""

# Annotations are evaluated here: the code that decodes messages reads those of ``Entry``.

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from distributor.text.wording import size
from distributor.values.codec import Between, Count, Path

#: Maximum bytes of ``output_dir`` that are sent with a job; from a larger one, nodes fetch files from the driver.
WITH_THE_JOB = 64 << 20

#: Maximum number of bytes of a file's name on Linux.
_LONGEST = 255


@dataclass(frozen=True)
class Inside:
    """The bound of a path that leads out of no folder."""

    def check(self, path: str) -> None:
        if "\0" in path or {"", ".", ".."} & {*path.split("/")}:
            raise ValueError(
                f"the path {path!r} is not relative, or contains NUL, or a part that is empty, '.' or '..'"
            )


RelativePath = Annotated[Path, Inside()]


@dataclass(frozen=True)
class Entry:
    """The description of a file that a rank has written."""

    path: RelativePath  # to the ranks' current directory, with slashes
    size: Count
    mode: Annotated[int, Between(0, 0o777)]
    mtime_ns: Annotated[int, Between(-(2**63), 2**63 - 1)]  # since the epoch
    digest: str  # SHA-256, hexadecimal


@dataclass(frozen=True)
class FileHead:
    """What precedes the content of a file that comes with the results of the Spark tasks."""

    node: int  # its rank
    entry: Entry
    uploaded: str | None = None  # temporary name at the URL, if output_dir is one


@dataclass(frozen=True)
class Brought:
    """A file of a rank that its node could not send over the channel: it came with the results of the Spark tasks."""

    node: int  # its rank
    entry: Entry
    pieces: Sequence[bytes] = field(repr=False)  # of the content
    uploaded: str | None = None  # temporary name at the URL, if output_dir is one


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
    """Return the temporary name in ``output_dir`` of a node's incomplete file; ``number`` tells several of them apart.

    >>> incoming("ckpt/a.pt", 1), is_incoming("ckpt/a.pt.node-1.part")
    ('ckpt/a.pt.node-1.part', True)
    """
    return fitted(path, f".node-{node}.part{'' if number is None else f'.{number}'}")


def is_incoming(name: str) -> bool:
    """Return whether :func:`incoming` has made a name. Files with such names may remain if the driver ends early."""
    return re.search(r"\.node-\d+\.part(\.\d+)?$", name) is not None


def make_way(folder: str, name: str) -> str:
    """Make room for a new file below ``folder``, and return its path. Links go too: they may lead outside."""
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


def beyond_limit(limit: int) -> str:
    """Return why a file is refused with which all files would exceed ``limit`` bytes."""
    return f"with this file, the files in output_dir would exceed output_limit ({size(limit)})"


def mark(run_id: str) -> str:
    """Return the name of the file that the driver writes to the URL ``output_dir``, for nodes to look for."""
    return f".distributor-{run_id}"


def own(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the user's files in ``output_dir``, without the files that this package puts there.

    >>> own({"a.pt": 3, "b.pt.node-1.part": 1, ".distributor-3f2a": 0})
    {'a.pt': 3}
    """
    return {name: sizes[name] for name in sizes if not (is_incoming(name) or name.startswith(mark("")))}
