"""From the ends of ranks to their outcomes: pure, except for the reading of the files that ranks have written."""

from __future__ import annotations

import pickle
import signal
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distributor import errors
from distributor.machine import processes
from distributor.values import layout
from distributor.values.job import Function
from distributor.values.messages import RankExited, Stopped
from distributor.values.outcome import Failure, Outcome
from distributor.values.plan import NodeOrder


@dataclass(frozen=True)
class Ends:
    """Everything known about the ends of a node's ranks.

    Attributes:
        exits: how the ranks' processes ended, by local rank. The end of a rank that is missing here is unknown.
        stopped: whether the agent has stopped the ranks.
        tails: the last output of each rank, by global rank.
        oom: whether the kernel has killed a process for lack of memory while the ranks ran.
        now: the current time, in seconds since the epoch. It stands for the time of an end that was not observed.
        shipped: paths of shipped files on this node, each with its path on the driver.
    """

    exits: Mapping[int, RankExited]
    stopped: bool = False
    tails: Mapping[int, bytes] | None = None
    oom: bool = False
    now: float = 0.0
    shipped: Sequence[tuple[str, str]] = ()


def read(order: NodeOrder, local_rank: int) -> Outcome | None:
    """Return the outcome that a rank has written, or ``None`` if it has not written one."""
    try:
        outcome: Outcome = pickle.loads(layout.outcome(order.folder, local_rank).read_bytes())
        return outcome
    except FileNotFoundError:
        return None


def outcome_of(order: NodeOrder, local_rank: int, told: Outcome | None, ends: Ends) -> Outcome:
    """Return the outcome of a rank that was started.

    Args:
        order: the launcher's order.
        local_rank: the rank.
        told: the outcome that the rank has written.
        ends: how the node's ranks have ended.
    """
    rank, host = order.plan.node.first_rank + local_rank, order.host
    exit = ends.exits.get(local_rank)
    if exit is None or exit.code != 0:
        failed = told is not None and told.state == "failed"
        by_us = ends.stopped if exit is None else exit.stopped
        if by_us and not failed:  # a rank that had already returned was about to end anyway
            return told or Outcome(rank, host, "stopped")
        return Outcome(rank, host, "failed", failure_of(order, local_rank, told, ends))
    if told is not None:
        return told
    if not isinstance(order.plan.target, Function):
        return Outcome(rank, host, "finished")
    message = "exited with code 0 before the function returned (os._exit?)"
    failure = Failure(rank, local_rank, host, "exit", message, exit_code=0, time=exit.time)
    return Outcome(rank, host, "failed", failure)


def failure_of(order: NodeOrder, local_rank: int, told: Outcome | None, ends: Ends) -> Failure:
    """Return why a rank failed: what the rank itself wrote, completed by how its process ended.

    The arguments are the same as for :func:`outcome_of`.
    """
    rank = order.plan.node.first_rank + local_rank
    exit = ends.exits.get(local_rank)
    if told is not None and told.failure is not None and told.state == "failed":
        failure = told.failure
    elif exit is None:
        message = "ended with the process that started it"
        failure = Failure(rank, local_rank, order.host, "lost", message, time=ends.now)
    else:
        failure = Failure(rank, local_rank, order.host, *describe_exit(exit.code, ends.oom), time=exit.time)
    # If a rank that had failed was told to stop on its way out, its failure is still the reason.
    if exit is not None and not exit.stopped:
        failure = replace(
            failure,
            exit_code=exit.code if exit.code >= 0 else None,
            signal=processes.signal_name(-exit.code) if exit.code < 0 else None,
        )
    tail = (ends.tails or {}).get(rank, b"").decode(errors="replace")
    return replace(
        failure,
        traceback=as_on_driver(failure.traceback, ends.shipped),
        log_tail=as_on_driver(tail, ends.shipped),
    )


def stopped(port: int, outcomes: Sequence[Outcome], error: tuple[str, str] | None) -> tuple[Stopped, ...]:
    """Return the message of a node whose attempt has failed, then ever shorter ones that leave out what is long."""
    plain = [replace(each, failure=each.failure and replace(each.failure, exception=None)) for each in outcomes]
    brief = [replace(each, failure=each.failure and replace(each.failure, traceback="", log_tail="")) for each in plain]
    bare = [replace(each, failure=None) for each in plain]
    return tuple(Stopped(port, tuple(each), error) for each in (plain, brief, bare))


def describe_exit(code: int, oom: bool) -> tuple[str, str]:
    """Return the kind and message of a process's end without an exception.

    >>> describe_exit(3, False), describe_exit(-9, False)
    (('exit', 'exited with code 3'), ('signal', 'killed by SIGKILL'))
    """
    if code >= 0:
        return "exit", f"exited with code {code}"
    name = processes.signal_name(-code)
    if -code == signal.SIGKILL and oom:
        return "signal", (
            f"killed by {name}, most likely for lack of memory: the kernel's out-of-memory killer was active at that "
            "time. Use smaller batches or fewer ranks per node, or give the executor more memory"
        )
    return "signal", f"killed by {name}"


def as_on_driver(text: str, shipped: Sequence[tuple[str, str]]) -> str:
    """Return a text with the paths of shipped files replaced by those on the driver.

    >>> as_on_driver('File "/tmp/node/script/train.py"', [("/tmp/node/script/train.py", "/home/train.py")])
    'File "/home/train.py"'
    """
    for here, there in shipped:
        text = text.replace(here, there)
    return text


def explain(error: Exception) -> tuple[str, str]:
    """Return what a node reports when it cannot start: this package's errors as they are, others with a traceback."""
    if isinstance(error, errors.DistributorError):
        return type(error).__name__, str(error)
    text = "".join(traceback.format_exception(error))
    return "StartError", f"the agent on {socket.gethostname()} failed: {type(error).__name__}: {error}\n\n{text}"
