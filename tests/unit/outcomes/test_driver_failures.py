"""The errors of a run that ended because the driver lacked something."""

from __future__ import annotations

import errno
import os
import pickle

import pytest

from distributor import errors
from distributor.outcomes import driver_failures


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space", "/tmp/a"), "the disk is full: delete files, or set TMPDIR to another"),
        (OSError(errno.EDQUOT, ""), "the disk quota is used up"),
        (OSError(errno.EROFS, ""), "the file system is read-only"),
        (
            OSError(errno.EMFILE, "Too many"),
            "this process has too many open files: raise ulimit -n ([Errno 24] Too many)",
        ),
        (OSError(errno.ENFILE, ""), "this machine has too many open files: end other processes, or raise sysctl"),
        (BlockingIOError(errno.EAGAIN, "again"), "no further process can be started: end other processes, or raise"),
        (OSError(errno.ENOMEM, ""), "there is too little memory: end other processes, or raise"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/gone"), "a file or folder is gone: [Errno 2] No such file"),
        (RuntimeError("can't start new thread"), "no further thread can be started: end other threads and processes"),
        (RuntimeError("something else"), "RuntimeError: something else"),
        (MemoryError(), "MemoryError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_any_error_becomes_one_of_ours(error: BaseException, text: str) -> None:
    ours = driver_failures.typed(error)
    assert type(ours) is errors.StartError
    assert str(ours).startswith(text)
    assert ours.__cause__ is error


def test_our_own_stay_as_they_are() -> None:
    error = errors.ResultError("no")
    assert driver_failures.typed(error) is error


@pytest.mark.parametrize("by_user", [True, False])
def test_a_session_that_was_stopped(by_user: bool) -> None:
    error = driver_failures.context_stopped("3f2a", by_user)
    assert ("by Spark itself" in str(error)) is not by_user
    assert driver_failures.is_final(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert not driver_failures.is_final(errors.RunCancelledError("no"))


def test_the_numbers_are_those_of_this_system() -> None:
    assert all(os.strerror(number) for number in driver_failures._NUMBERS)
