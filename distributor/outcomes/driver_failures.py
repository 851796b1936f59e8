"""Errors for runs that the driver cannot continue, since it lacks a resource or something that it used is gone."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TypeVar

from distributor.errors import DistributorError, RunCancelledError, StartError

E = TypeVar("E", bound=DistributorError)

_NUMBERS = {
    errno.ENOSPC: "the disk is full: delete files, or set TMPDIR to another folder before Python starts",
    errno.EDQUOT: "the disk quota is used up: delete files, or set TMPDIR to another folder before Python starts",
    errno.EROFS: "the file system is read-only: set TMPDIR to another folder before Python starts",
    errno.EMFILE: "this process has too many open files: raise ulimit -n",
    errno.ENFILE: "this machine has too many open files: end other processes, or raise sysctl fs.file-max",
    errno.EAGAIN: "no further process can be started: end other processes, or raise ulimit -u or the container's limit",
    errno.ENOMEM: "there is too little memory: end other processes, or raise the container's limit",
}

_NO_THREAD = (
    "no further thread can be started: end other threads and processes, or raise ulimit -u, ulimit -v or the "
    "container's limit"
)


@dataclass(frozen=True)
class Loss:
    """What Spark says of a task that it lost, and how settings explain this; each is ``""`` if it is not known."""

    said: str = ""
    explanation: str = ""


UNKNOWN = Loss()


def explained(error: E, loss: Loss) -> E:
    """Add to an error why Spark lost a task, for the error that names the lost nodes."""
    error._loss = loss  # type: ignore[attr-defined]
    return error


def loss_of(error: BaseException) -> Loss:
    """Return what :func:`explained` has added."""
    loss: Loss = getattr(error, "_loss", UNKNOWN)
    return loss


def typed(error: BaseException) -> DistributorError:
    """Return an error of this package for any error that ended a run on the driver.

    >>> typed(OSError(errno.EMFILE, "Too many open files"))
    StartError('this process has too many open files: raise ulimit -n ([Errno 24] Too many open files)')
    """
    if isinstance(error, DistributorError):
        return error
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        text = f"{_NUMBERS[error.errno]} ({error})"
    elif isinstance(error, RuntimeError) and "start new thread" in str(error):
        text = f"{_NO_THREAD} ({error})"
    elif isinstance(error, FileNotFoundError):
        text = f"a file or folder is gone: {error}"
    ours = mishap(StartError(text))
    ours.__cause__ = error
    return ours


def mishap(error: E) -> E:
    """Mark an error as a failure of the driver itself, which the loss of nodes does not explain."""
    error._mishap = True  # type: ignore[attr-defined]
    return error


def is_mishap(error: BaseException) -> bool:
    """Return whether an error says that the driver itself has failed."""
    return getattr(error, "_mishap", False)


def context_stopped(label: str, by_user: bool) -> RunCancelledError:
    """Return the error of a run whose Spark context was stopped."""
    who = "spark.stop()" if by_user else "spark.stop(), or by Spark itself (see Spark's log on the driver)"
    return _session_end(RunCancelledError(f"run {label} was cancelled, because its Spark session was stopped by {who}"))


def jvm_ended(label: str) -> StartError:
    """Return the error of a run whose Spark driver's JVM has ended."""
    return _session_end(
        mishap(
            StartError(
                f"run {label} was lost, because Spark's JVM on the driver ended (killed, out of memory, or crashed: "
                "see the driver's log), which also ended the executors. Restart Python or the notebook's kernel"
            )
        )
    )


def is_session_end(error: BaseException | None) -> bool:
    """Return whether an error says that Spark's session has ended, and so no other run of it can start."""
    return getattr(error, "_session_end", False)


def _session_end(error: E) -> E:
    error._session_end = True  # type: ignore[attr-defined]
    return final(error)


def is_final(error: BaseException) -> bool:
    """Return whether an error already explains why all nodes were lost: a ``NodeLostError`` would not."""
    return getattr(error, "_final", False)


def final(error: E) -> E:
    """Mark an error as the explanation of a run's end: none about lost nodes replaces it, and no attempt follows."""
    error._final = True  # type: ignore[attr-defined]
    return error
