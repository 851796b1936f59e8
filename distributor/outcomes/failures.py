"""Sorts failures, with the root first: the likely cause of the others. Describes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import indent

from distributor.outcomes import stacks
from distributor.text import cells
from distributor.text.wording import count, who
from distributor.values.echoes import TORCH_KINDS, is_echo
from distributor.values.outcome import Failure

#: Where collectives and rendezvous raise errors.
_COLLECTIVES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/rendezvous.py",
)

#: Put by torch before each line of an uncaught exception once there is a process group.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")


#: Maximum numbers in an error text: lines of a rank's log, host names, and tracebacks besides the first one.
_TAIL_LINES = 20


_HOSTS = 3


_TRACES = 4


#: Text that differs between ranks that fail alike: memory addresses and network addresses.
_VARYING = re.compile(r"\b0x[0-9a-f]+|\[[0-9a-f.:]+\]:[0-9]+")


#: A traceback frame, in a file or in a notebook cell.
_FRAME = re.compile(r'^[ |+]*(?:File ")?(?P<path>(?<=")[^"]+|Cell In\[\d+\])"?, line (?P<line>\d+)')


#: Texts of CUDA's errors that follow from the hardware or the driver. Source: cudaGetErrorString in its Runtime API.
_BROKEN_GPU = re.compile(
    r"uncorrectable (ECC|NVLink) error|device\(s\) is/are busy or unavailable|system not yet initialized"
    r"|hardware stack error|GPU is lost",
    re.IGNORECASE,
)

#: What torch raises in a rank if a worker of its DataLoader gets SIGKILL, as from the out-of-memory killer.
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: Killed")


def order_failures(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the failures with the root first, then the others in order of time.

    Failures of ranks that were told to stop come last as a root, and before them those that look like consequences.
    """
    by_time = sorted(failures, key=lambda failure: failure.time)
    root = min(by_time, key=lambda failure: (failure.after_stop, is_consequence(failure), failure.time))
    return (root, *(failure for failure in by_time if failure is not root))


def has_cause(failures: Sequence[Failure | None]) -> bool:
    """Return whether any failure is more than a consequence of a lost rank or node."""
    return any(failure is None or not (failure.kind == "lost" or is_echo(failure)) for failure in failures)


def is_consequence(failure: Failure) -> bool:
    """Return whether a failure looks like a consequence of another, such as a connection to a peer that ended."""
    return failure.signal == "SIGABRT" or failure.kind == "lost" or is_echo(failure)


def consequent(failures: Sequence[Failure]) -> list[int]:
    """Return the ranks whose failures look like consequences of the root."""
    return [failure.rank for failure in order_failures(failures)[1:] if is_consequence(failure)] if failures else []


def is_broken_gpu(failure: Failure) -> bool:
    """Return whether CUDA reports a failure of the hardware, or a GPU that cannot be used now."""
    return failure.kind in ("AcceleratorError", "RuntimeError") and _BROKEN_GPU.search(failure.message) is not None


def is_infrastructure(failure: Failure) -> bool:
    """Return whether a failure came from a process, a machine or the network, and not from the user's code.

    An exception counts if its type is torch.distributed's, if it reports a broken GPU, if it is a ``StopError``, if it
    says that a worker of a DataLoader was killed, or if a collective or torch's store raised it as a ``RuntimeError``
    or ``TimeoutError``. Torch raises many in C++: their traceback ends with the Python line that called it, where one
    of the user's code ends with a ``raise`` statement.
    """
    if failure.kind in ("signal", "lost", "StopError", *TORCH_KINDS):
        return True
    if is_broken_gpu(failure):
        return True
    if failure.kind == "RuntimeError" and _KILLED_WORKER.search(f"{failure.message}\n{failure.traceback}"):
        return True
    lines = failure.traceback.splitlines()
    frames = [(frame["path"], line) for line, text in enumerate(lines) if (frame := _FRAME.match(text))]
    if not frames or failure.kind not in ("RuntimeError", "TimeoutError"):
        return False
    path, line = frames[-1]
    if path.endswith(_COLLECTIVES):
        return True
    statement = lines[line + 1].strip() if line + 1 < len(lines) else ""
    return is_echo(failure) and ("/torch/" in path or (statement != "" and not statement.startswith("raise")))


def describe(failures: Sequence[Failure], advice: str = "") -> str:
    """Return the text of a :class:`~distributor.errors.TrainingError`. The first failure must be the root."""
    root = failures[0]
    alike, *others = _alike(failures)
    parts = [f"{_who(alike)} failed: {root.message}"]
    if advice:
        parts.append(advice)
    if root.traceback.strip() not in ("", root.message):
        parts.append(root.traceback.rstrip())
    if last_lines := _last_lines(root):
        parts.append(f"The last lines of rank {root.rank}:\n{last_lines}")
    if others:
        shown = {_frames(root)}
        listed = "\n".join(_after(group, shown) for group in others)
        parts.append(f"Later failures, perhaps caused by the first:\n{listed}")
    return "\n\n".join(parts)


def _alike(failures: Sequence[Failure]) -> list[list[Failure]]:
    """Group failures that differ only in memory or network addresses, in the order of each group's first failure."""
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        same = (_VARYING.sub("", failure.message), _VARYING.sub("", failure.traceback))
        groups.setdefault(same, []).append(failure)
    return list(groups.values())


def _who(failures: Sequence[Failure]) -> str:
    hosts = list(dict.fromkeys(failure.host for failure in failures))
    named = ", ".join(hosts) if len(hosts) <= _HOSTS else count(len(hosts), "host")
    return f"{who(failure.rank for failure in failures)} on {named}"


def _after(group: Sequence[Failure], shown: set[tuple[str, ...]]) -> str:
    """Return a line about equal failures, with their traceback unless it is ``shown``, too much, or a consequence's."""
    first, frames = group[0], _frames(group[0])
    line = f"  {_who(group)}: {first.message}"
    if not frames or frames in shown:
        return line
    if is_consequence(first) or len(shown) > _TRACES:
        return f"{line} (at {_place(frames)})"
    shown.add(frames)
    return f"{line}\n{indent(first.traceback.rstrip(), '    ')}"


def _frames(failure: Failure) -> tuple[str, ...]:
    """Return the traceback lines that name a file or cell and a line number, outermost first."""
    return tuple(line for line in failure.traceback.splitlines() if _FRAME.search(line))


def _place(frames: Sequence[str]) -> str:
    """Return the place of the innermost frame of user code, such as ``train.py:40``, or else of the innermost frame."""
    matches = [frame for line in frames if (frame := _FRAME.search(line))]
    users = [frame for frame in matches if not stacks.is_library(frame["path"])]
    frame = (users or matches)[-1]
    return f"{frame['path'].rpartition('/')[2]}:{frame['line']}"


def _last_lines(failure: Failure) -> str:
    """Return the end of a rank's output, without the lines of its traceback, which the error shows anyway."""
    known = set(failure.traceback.splitlines())
    lines = [line for line in failure.log_tail.rstrip().splitlines() if _told(line) not in known]
    return "\n".join(lines[-_TAIL_LINES:]).strip("\n")


def _told(line: str) -> str:
    """Return a line of output as the failure's traceback would show it: without torch's prefix, with names of cells."""
    return cells.readable(_RANK_PREFIX.sub("", line)).partition("\n")[0]
