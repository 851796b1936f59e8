"""Failures in order and in words, the root first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import indent

from distributor.outcomes import stacks
from distributor.text import cells
from distributor.text.wording import count, who
from distributor.values.outcome import Failure

#: How a rank's exception looks when the cause is the loss of another: gloo's, NCCL's and the store's own words.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused|was aborted)|broken pipe|socket timeout|timed out|gloo|nccl|tcpstore"
    r"|remote process exited|peer",
    re.IGNORECASE,
)


_CONSEQUENCE_KINDS = (
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
)


#: What torch puts before each line of an uncaught exception once a process group is there.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")


#: Lines of a rank's log, hosts by name, and tracebacks besides that of the root in an error text.
_TAIL_LINES = 20


_HOSTS = 3


_TRACES = 4


#: What differs between ranks that fail alike: addresses in memory, and of connections.
_VARYING = re.compile(r"\b0x[0-9a-f]+|\[[0-9a-f.:]+\]:[0-9]+")


#: A frame of a traceback, of a file or of a notebook's cell.
_FRAME = re.compile(r'^[ |+]*(?:File ")?(?P<path>(?<=")[^"]+|Cell In\[\d+\])"?, line (?P<line>\d+)')


def order_failures(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """The root first, then the others in order of time."""
    by_time = sorted(failures, key=lambda failure: failure.time)
    root = min(by_time, key=lambda failure: (is_consequence(failure), failure.time))
    return (root, *(failure for failure in by_time if failure is not root))


def has_cause(failures: Sequence[Failure | None]) -> bool:
    """Whether any failure is more than the echo of a rank or a node that is gone."""
    return any(failure is None or not (failure.kind == "lost" or is_echo(failure)) for failure in failures)


def is_consequence(failure: Failure) -> bool:
    """Whether a failure looks like the echo of another: a broken connection, an aborted collective."""
    return failure.signal == "SIGABRT" or failure.kind == "lost" or is_echo(failure)


def is_echo(failure: Failure) -> bool:
    """Whether its words are those of a connection or collective that broke."""
    if failure.kind in _CONSEQUENCE_KINDS:
        return True
    return failure.kind == "RuntimeError" and bool(_CONSEQUENCE.search(failure.message))


def describe(failures: Sequence[Failure], advice: str = "") -> str:
    """The text of a :class:`~distributor.errors.TrainingError`; ``failures`` with the root first.

    Each traceback is told once, whoever raised it. What only echoes the root is told in a line.
    """
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
        told = {_frames(root)}
        listed = "\n".join(_after(group, told) for group in others)
        parts.append(f"After it, and perhaps because of it:\n{listed}")
    return "\n\n".join(parts)


def _alike(failures: Sequence[Failure]) -> list[list[Failure]]:
    """Failures in groups that say the same, in the order of the first of each."""
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        same = (_VARYING.sub("", failure.message), _VARYING.sub("", failure.traceback))
        groups.setdefault(same, []).append(failure)
    return list(groups.values())


def _who(failures: Sequence[Failure]) -> str:
    """Ranks and their hosts: ``ranks 0-1 on host-a``."""
    hosts = list(dict.fromkeys(failure.host for failure in failures))
    named = ", ".join(hosts) if len(hosts) <= _HOSTS else count(len(hosts), "host")
    return f"{who(failure.rank for failure in failures)} on {named}"


def _after(group: Sequence[Failure], told: set[tuple[str, ...]]) -> str:
    """A line about failures that are alike, and their traceback where it leads to where none has led before.

    Args:
        group: the failures.
        told: the frames of tracebacks that are told; these are added.
    """
    first, frames = group[0], _frames(group[0])
    line = f"  {_who(group)}: {first.message}"
    if not frames or frames in told:
        return line
    if is_consequence(first) or len(told) > _TRACES:
        return f"{line} (at {_place(frames)})"
    told.add(frames)
    return f"{line}\n{indent(first.traceback.rstrip(), '    ')}"


def _frames(failure: Failure) -> tuple[str, ...]:
    """Where a failure was raised: the lines of its traceback that name that, outermost first."""
    return tuple(line for line in failure.traceback.splitlines() if _FRAME.search(line))


def _place(frames: Sequence[str]) -> str:
    """The innermost line of the user's code: ``train.py:40``."""
    found = [frame for line in frames if (frame := _FRAME.search(line))]
    own = [frame for frame in found if not stacks.is_library(frame["path"])]
    frame = (own or found)[-1]
    return f"{frame['path'].rpartition('/')[2]}:{frame['line']}"


def _last_lines(failure: Failure) -> str:
    """The end of what a rank wrote, without the traceback that is told anyway."""
    known = set(failure.traceback.splitlines())
    lines = [line for line in failure.log_tail.rstrip().splitlines() if _told(line) not in known]
    return "\n".join(lines[-_TAIL_LINES:]).strip("\n")


def _told(line: str) -> str:
    """A line that torch has printed of a traceback as the traceback has it."""
    return cells.readable(_RANK_PREFIX.sub("", line)).partition("\n")[0]
