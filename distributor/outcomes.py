"""What came of a run: from the reports of its nodes to the values, or to the one exception that tells the truth.

Pure functions. The first failure in time is the root, except that a broken connection is never the root of anything
while another failure explains it: a rank whose peer was killed may notice before the peer's own node does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import indent
from types import MappingProxyType
from typing import Any

from distributor import cells, errors, payload, stacks
from distributor.channel.frames import Log
from distributor.job import Failure, NodeReport
from distributor.wording import count, who

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

#: What to do about a failure, ``""`` where there is nothing to add.
Advise = Callable[[Failure], str]

#: Lines of a rank's log, hosts by name, and tracebacks besides that of the root in an error text.
_TAIL_LINES = 20
_HOSTS = 3
_TRACES = 4

#: What differs between ranks that fail alike: addresses in memory, and of connections.
_VARYING = re.compile(r"\b0x[0-9a-f]+|\[[0-9a-f.:]+\]:[0-9]+")

#: A frame of a traceback, of a file or of a notebook's cell.
_FRAME = re.compile(r'^[ |+]*(?:File ")?(?P<path>(?<=")[^"]+|Cell In\[\d+\])"?, line (?P<line>\d+)')


@dataclass(frozen=True)
class Collected:
    """What a scheduler brings back in band.

    Attributes:
        reports: of the nodes.
        values: pickled return values in pieces, by rank.
        lost_hosts: where nodes are that never reported.
        logs: output of ranks that did not come over the channel.
        times: what the scheduler knows of moments of the run, in seconds since the epoch.
    """

    reports: tuple[NodeReport, ...] = ()
    values: Mapping[int, Sequence[bytes]] = field(default_factory=dict, repr=False)
    lost_hosts: tuple[str, ...] = ()
    logs: tuple[Log, ...] = field(default=(), repr=False)
    times: Mapping[str, float] = field(default_factory=dict)


def values(collected: Collected, world_size: int, advise: Advise = lambda failure: "") -> dict[int, Any]:
    """The return values by rank, as far as they were sent; none for a script or a module.

    Args:
        collected: what came.
        world_size: how many ranks there are.
        advise: what to do about the root of a failure.

    Raises:
        TrainingError: a rank failed.
        NodeLostError: a node never reported.
        ResultError: a rank succeeded but its value could not be pickled, or the driver cannot read it.
        StartError, ResourceError: a node could not start, or lacks what a rank needs.
    """
    for report in collected.reports:
        if report.error is not None:
            kind, message = report.error
            raise getattr(errors, kind)(message)
    outcomes = {outcome.rank: outcome for report in collected.reports for outcome in report.outcomes}
    failures = [outcome.failure for outcome in outcomes.values() if outcome.state == "failed" and outcome.failure]
    if failures:
        returned = {rank: outcome.returned for rank, outcome in sorted(outcomes.items()) if outcome.returned}
        raise training_error(failures, advise, returned)
    if collected.lost_hosts:
        raise node_lost(collected.lost_hosts)
    missing = sorted(set(range(world_size)) - {rank for rank, o in outcomes.items() if o.state != "stopped"})
    if missing:
        gave_up = [f"the node on {report.host} {report.gave_up}" for report in collected.reports if report.gave_up]
        were = "was stopped before it finished" if len(missing) == 1 else "were stopped before they finished"
        raise errors.NodeLostError(
            f"{who(missing)} {were}: "
            + ("; ".join(gave_up) or "an executor was lost, or the Spark job was ended from outside; no rank says why")
        )
    unreturned = [outcomes[rank] for rank in sorted(outcomes) if outcomes[rank].state == "unreturned"]
    if unreturned and unreturned[0].failure is not None:
        failure = unreturned[0].failure
        raise errors.ResultError(
            f"rank {failure.rank} on {failure.host} finished, but {failure.message}. "
            "Return plain data: numbers, strings, a state dict"
        )
    return {rank: payload.load_value(chunks, rank) for rank, chunks in sorted(collected.values.items())}


def training_error(
    failures: Sequence[Failure],
    advise: Advise = lambda failure: "",
    returned: Mapping[int, float] = MappingProxyType({}),
) -> errors.TrainingError | errors.StartError:
    """The exception for a run whose ranks failed: the root first, its original exception as ``__cause__``.

    A rank that found, before it called anything of the user's, that its node lacks something makes it a ``StartError``.

    Args:
        failures: of its ranks.
        advise: what to do about the root.
        returned: when ranks had returned, in seconds since the epoch.
    """
    told = [replace(failure, traceback=cells.readable(failure.traceback)) for failure in failures]
    ordered = order_failures(told)
    cause = payload.load_exception(ordered[0].exception)
    if isinstance(cause, errors.StartError):
        return errors.StartError(f"on {ordered[0].host}: {cause}")
    advice = advise(ordered[0])
    gone = [rank for rank, moment in returned.items() if moment < ordered[0].time]
    if gone and _is_echo(ordered[0]):
        advice = f"{who(gone).capitalize()} had returned before: all ranks have to take part in each collective"
    return errors.TrainingError(describe(ordered, advice), ordered, cause)


def node_lost(nodes: Sequence[str]) -> errors.NodeLostError:
    """The exception for nodes that went away: their hosts, with whatever else is known of them."""
    return errors.NodeLostError(
        f"lost the node on {'; '.join(sorted(set(nodes)))}. Its agent, Python worker or executor ended or was cut off "
        "while ranks were running (killed, out of memory, the machine or its network went away); "
        "the executor's own log says more"
    )


def order_failures(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """The root first, then the others in order of time."""
    by_time = sorted(failures, key=lambda failure: failure.time)
    root = min(by_time, key=lambda failure: (is_consequence(failure), failure.time))
    return (root, *(failure for failure in by_time if failure is not root))


def has_cause(failures: Sequence[Failure | None]) -> bool:
    """Whether any failure is more than the echo of a rank or a node that is gone."""
    return any(failure is None or not (failure.kind == "lost" or _is_echo(failure)) for failure in failures)


def is_consequence(failure: Failure) -> bool:
    """Whether a failure looks like the echo of another: a broken connection, an aborted collective."""
    return failure.signal == "SIGABRT" or failure.kind == "lost" or _is_echo(failure)


def _is_echo(failure: Failure) -> bool:
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
