"""Determines how ranks have ended, from their processes' ends and their own reports. Without side effects."""

from __future__ import annotations

import errno
import pickle
import re
import signal
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distributor.channel import rank_slots
from distributor.errors import DistributorError
from distributor.machine import processes
from distributor.values.echoes import is_echo
from distributor.values.job import Function, Target
from distributor.values.messages import RankExited, Stopped
from distributor.values.outcome import Ending, Failure, Outcome
from distributor.values.plan import NodeOrder

#: Matches what Python, C++, torch and OpenBLAS say if a process gets no more memory.
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|(can't|cannot|failed to) allocate memory|memory allocation", re.IGNORECASE
)


@dataclass(frozen=True)
class Now:
    """The current time: seconds since the epoch, and on the monotonic clock, which all processes of a host share."""

    wall: float
    moment: float

    def ago(self, moment: float) -> float:
        """Convert a time on the monotonic clock to seconds since the epoch."""
        return self.wall - (self.moment - moment)


@dataclass(frozen=True)
class Ends:
    """Everything known about the ends of a node's ranks."""

    exits: Mapping[int, RankExited]  # by local rank; none if unknown
    stopped: bool = False  # by the agent
    tails: Mapping[int, bytes] | None = None  # last output, by global rank
    oom: bool = False  # the kernel has killed a process for lack of memory meanwhile
    full: str | None = None  # the node's folder, if its disk is full
    limit: str | None = None  # of the memory of processes, as a text after "the node"
    now: Now = Now(0.0, 0.0)  # a rank whose end the launcher has not seen counts as ended now
    shipped: Sequence[tuple[str, str]] = ()  # paths of each shipped file: on this node, on the driver


def read(slots: int, local_rank: int) -> Ending | None:
    """Return what a rank has reported about its end, if anything."""
    said = rank_slots.read(slots, local_rank)
    return parse(said) if said else None


def parse(said: bytes) -> Ending:
    """Return the report that a rank has written to its slot."""
    told: Ending = pickle.loads(said)
    return told


def leaves_early(target: Target, ending: Ending | None) -> bool:
    """Return whether a rank that ended with code 0 has not finished: a function must have returned."""
    return isinstance(target, Function) if ending is None else ending.outcome.state == "failed"


def echoes(ending: Ending | None) -> bool:
    """Return whether a rank has failed because it lost its connection to another."""
    failure = None if ending is None else ending.outcome.failure
    return failure is not None and is_echo(failure)


def outcome_of(order: NodeOrder, local_rank: int, ending: Ending | None, ends: Ends) -> Outcome:
    """Return the outcome of a rank that was started."""
    rank, host = order.plan.node.first_rank + local_rank, order.host
    told = None if ending is None else ending.outcome
    exit = ends.exits.get(local_rank)
    if exit is None or not exit.succeeded:
        by_us = ends.stopped if exit is None else exit.stopped is not None
        failed = ending is not None and ending.known != "type" and ending.outcome.state == "failed"
        if by_us and not (failed and not _obeys(ending, exit)):  # if the rank has returned, its own report counts
            return told if told is not None and told.state != "failed" else Outcome(rank, host, "stopped")
        return Outcome(rank, host, "failed", failure_of(order, local_rank, ending, ends))
    if _has_served(ending, exit):
        return Outcome(rank, host, "finished")
    return Outcome(rank, host, "finished") if told is None else told


def _obeys(ending: Ending | None, exit: RankExited | None) -> bool:
    """Return whether a rank has called ``sys.exit`` once it was told to stop, as handlers of SIGTERM do."""
    if ending is None or exit is None or exit.stopped is None:
        return False
    failure = ending.outcome.failure
    return failure is not None and failure.kind == "exit" and ending.moment >= exit.stopped


def _has_served(ending: Ending | None, exit: RankExited) -> bool:
    """Return whether the launcher ended a serving rank, such as a parameter server, while its function was running.

    If the function has returned, or had failed before, the rank's own report says how it ended.
    """
    if exit.released is None or (ending is not None and ending.outcome.state != "failed"):
        return False
    return ending is None or ending.moment >= exit.released


def failure_of(order: NodeOrder, local_rank: int, ending: Ending | None, ends: Ends) -> Failure:
    """Return why a rank failed."""
    rank = order.plan.node.first_rank + local_rank
    exit = ends.exits.get(local_rank)
    told = None if ending is None or ending.outcome.state != "failed" else ending.outcome.failure
    if told is not None:
        failure = told
    elif exit is None:
        failure = Failure(
            rank, local_rank, order.host, "lost", "ended together with its launcher, the process that started it"
        )
    else:
        failure = Failure(rank, local_rank, order.host, *describe_exit(exit.code, ends.oom))
    moment = _moment(ending, exit, ends.now)
    # If a rank was told to stop, the end of its process says nothing about its failure.
    if exit is not None and exit.stopped is None:
        failure = replace(
            failure,
            exit_code=exit.code if exit.code >= 0 else None,
            signal=processes.signal_name(-exit.code) if exit.code < 0 else None,
        )
    tail = (ends.tails or {}).get(rank, b"").decode(errors="replace")
    why = "" if ends.full is None else f". The disk of {ends.full} on {order.host} is full"
    if ends.limit is not None and _NO_MEMORY.search(f"{failure.message}\n{tail}"):
        why += f". The node {ends.limit}"
    return replace(
        failure,
        message=failure.message + why,
        time=ends.now.ago(moment),
        after_stop=exit is not None and exit.stopped is not None and moment >= exit.stopped,
        traceback=as_on_driver(failure.traceback, ends.shipped),
        log_tail=as_on_driver(tail, ends.shipped),
    )


def _moment(ending: Ending | None, exit: RankExited | None, now: Now) -> float:
    """Return when a rank failed, as it has reported or else as its process ended.

    A reported time that is impossible is ignored, since user code may have replaced the clock.
    """
    end = now.moment if exit is None else exit.moment
    return ending.moment if ending is not None and 0 <= ending.moment <= end else end


def within(outcomes: Sequence[Outcome], most: int) -> tuple[Outcome, ...]:
    """Return the outcomes with at most ``most`` bytes of pickled exceptions, those of the earliest failures."""
    by_time = sorted((each.failure for each in outcomes if each.failure is not None), key=lambda each: each.time)
    kept = set()
    for failure in by_time:
        most -= len(failure.exception or b"")
        if most >= 0:
            kept.add(failure.rank)
    return tuple(
        each
        if each.failure is None or each.rank in kept
        else replace(each, failure=replace(each.failure, exception=None))
        for each in outcomes
    )


def stopped(attempt: int, port: int, outcomes: Sequence[Outcome], error: tuple[str, str] | None) -> tuple[Stopped, ...]:
    """Return a failed attempt's message at three lengths, of which the caller sends the first that fits into a frame.

    The first one lacks exceptions, the second also tracebacks and output, the third failures.
    """
    plain = [replace(each, failure=each.failure and replace(each.failure, exception=None)) for each in outcomes]
    brief = [replace(each, failure=each.failure and replace(each.failure, traceback="", log_tail="")) for each in plain]
    bare = [replace(each, failure=None) for each in plain]
    return tuple(Stopped(port, tuple(each), error, attempt=attempt) for each in (plain, brief, bare))


def describe_exit(code: int, oom: bool) -> tuple[str, str]:
    """Return kind and message of a failure without an exception.

    >>> describe_exit(3, False), describe_exit(-9, False)
    (('exit', 'exited with code 3'), ('signal', 'killed by SIGKILL'))
    """
    if code == 0:
        return "exit", "exited with code 0 before the function returned (os._exit?)"
    if code > 0:
        return "exit", f"exited with code {code}"
    name = processes.signal_name(-code)
    if -code == signal.SIGKILL and oom:
        return "signal", (
            f"killed by {name}, most likely for lack of memory: the kernel's out-of-memory killer was active at that "
            "time. Use smaller batches or fewer ranks per node, or give the node more memory"
        )
    return "signal", f"killed by {name}"


def as_on_driver(text: str, shipped: Sequence[tuple[str, str]]) -> str:
    """Replace paths of shipped files by those on the driver.

    >>> as_on_driver('File "/tmp/node/script/train.py"', [("/tmp/node/script/train.py", "/home/train.py")])
    'File "/home/train.py"'
    """
    for here, there in shipped:
        text = text.replace(here, there)
    return text


def explain(error: Exception, folder: str) -> tuple[str, str]:
    """Return class and text of the error of a node that cannot start, or whose agent has failed.

    Errors of other packages have a traceback, unless the disk is full, or too many files are open.
    """
    if isinstance(error, DistributorError):
        return type(error).__name__, str(error)
    host = socket.gethostname()
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "StartError", f"the disk of {folder} on {host} is full: make room there, or set TMPDIR to another folder"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = "ulimit -n of the process that starts executors, or of the driver in local mode"
        return "StartError", f"the agent on {host} has too many open files: raise {limit}"
    text = "".join(traceback.format_exception(error))
    return "StartError", f"the agent on {host} failed: {type(error).__name__}: {error}\n\n{text}"
