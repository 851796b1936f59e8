"""Reports how a rank has ended: what its function, script or module returned or raised.

The report goes into memory that the rank shares with its agent, so it needs no disk. Preparing it may run user code
(``__str__`` of an exception, ``__reduce__`` of a value) that never ends, so there are deadlines.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from distributor.channel.rank_slots import Slot
from distributor.shipping import pickling
from distributor.text.wording import shortened, size
from distributor.values import layout
from distributor.values.outcome import Ending, Failure, Outcome
from distributor.values.plan import NodeOrder

PATIENCE = 10.0  # seconds to format and pickle an exception, and for the hook that prints it

VALUE_PATIENCE = 300.0  # seconds without progress after which the pickling of a value is given up

SMALL_VALUE = 1 << 20  # bytes of a pickled value; a larger one goes into a file

_PICKLED = 1 << 20  # bytes of a pickled exception; of a larger one, the driver gets only the text

_MESSAGE, _TRACEBACK = 1000, 64 << 10  # characters of a failure's message and of its traceback

_PIECE = 16 << 20  # bytes that are written to a file at a time; each piece is progress

# User code may replace these functions, and this module needs them afterwards.
_exit, _wall, _monotonic = os._exit, time.time, time.monotonic


class RankResult:
    """Reports to the agent how this rank ends. In a fork of the rank, it reports nothing."""

    def __init__(self, order: NodeOrder, local_rank: int, slot: Slot) -> None:
        self._order = order
        self._local_rank = local_rank
        self._rank = order.plan.node.first_rank + local_rank
        self._slot = slot
        self._called: float | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this process is the rank itself, and not a fork of it."""
        return self._slot.is_mine

    def called(self) -> None:
        """Record when the rank's function, script or module begins."""
        self._called = _wall()

    def exited(self, code: int, text: str = "") -> None:
        """Report that the rank exits with a code other than 0, as after ``sys.exit(3)`` or ``sys.exit("text")``."""
        message = shortened(f"exited with code {code}: {text}" if text else f"exited with code {code}", _MESSAGE)
        self._tell(self._failed("exit", message, exit_code=code), _monotonic())

    def raised(self, error: BaseException) -> str:
        """Report that the user's code has raised an exception, and return what Python prints for it.

        If the exception's own code takes longer than :data:`PATIENCE`, report only what is known by then, and exit.
        """
        moment, kind = _monotonic(), type(error).__name__
        unknown = self._failed(kind, f"{_name(error)} (its text could not be obtained)", _frames(error))
        self._tell(unknown, moment, known="type")
        late = f"{_name(error)} (its text was not available after {PATIENCE:g} s)"
        best, text = [self._failed(kind, late, _frames(error))], _frames(error)
        late_exit = deadline(PATIENCE, lambda: self._give_up(best[-1], moment, 1))
        with _held_back(signal.SIGTERM), late_exit, suppress(BaseException):
            text, summary = printed(error), shortened(_summary(error), _MESSAGE)
            outcome = self._failed(kind, summary, shortened(text, _TRACEBACK))
            best.append(outcome)
            self._tell(outcome, moment, known="text")
            pickled = pickling.dump_exception(error)
            if pickled is not None and len(pickled) <= _PICKLED and outcome.failure is not None:
                best.append(replace(outcome, failure=replace(outcome.failure, exception=pickled)))
            self._tell(best[-1], moment)
        return text

    def returned(self, value: Any, alone: str | None = None) -> None:
        """Report a returned value; ``alone`` is the framework with which the rank trained without the others.

        If pickling makes no progress for :data:`VALUE_PATIENCE`, report that the value cannot be pickled, and exit.
        """
        if not self.is_mine:
            return
        moment, host = _monotonic(), self._order.host
        outcome = Outcome(self._rank, host, "finished", None, self._called, _wall(), alone)
        if self._rank != 0 and not self._order.collect_all:
            self._tell(outcome, moment)
            return
        spill = _Spill(layout.value(self._order.folder, self._rank))
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        never = f"cannot be pickled (no progress for {VALUE_PATIENCE:g} s)"
        try:
            with _progress(spill, lambda: self._give_up(self._unreturned(outcome, kind, never), moment, 0)):
                pickling.dump_value(value, spill)  # type: ignore[arg-type]  # a pickler needs only write()
                small = spill.close()
        except _DiskError as error:
            why = f"cannot be written to {self._order.folder} ({error}): make room there, or write it to permanent "
            outcome = self._unreturned(outcome, kind, f"{why}storage and return its path", plain=False)
        except BaseException as error:
            outcome = self._unreturned(outcome, kind, f"cannot be pickled ({type(error).__name__}: {error})")
        else:
            self._tell(outcome, moment, small)
            return
        spill.discard()
        self._tell(outcome, moment)

    def _unreturned(self, outcome: Outcome, kind: str, why: str, *, plain: bool = True) -> Outcome:
        message = shortened(f"its return value of type {kind} {why}", _MESSAGE)
        if plain:
            message += ". Return plain data: numbers, strings, a state dict"
        return replace(outcome, state="unreturned", failure=self._failed(kind, message).failure)

    def _failed(self, kind: str, message: str, text: str = "", *, exit_code: int = 1) -> Outcome:
        host = self._order.host
        failure = Failure(self._rank, self._local_rank, host, kind, message, text, exit_code=exit_code, time=_wall())
        return Outcome(self._rank, host, "failed", failure, self._called)

    def _tell(
        self, outcome: Outcome, moment: float, value: bytes | None = None, known: Literal["type", "text", "all"] = "all"
    ) -> None:
        self._slot.write(pickle.dumps(Ending(outcome, moment, value, known)))

    def _give_up(self, outcome: Outcome, moment: float, code: int) -> None:
        self._tell(outcome, moment)
        _exit(code)


class _DiskError(Exception):
    """A rank's return value cannot be written to its file."""


class _Spill:
    """Takes a pickled value in pieces, and keeps it in memory if it is small, otherwise in a file."""

    def __init__(self, path: Path) -> None:
        self.taken = 0  # grows whenever data is written
        self._path = path
        self._partial = path.with_suffix(".partial")
        self._memory = bytearray()
        self._file: BinaryIO | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._file is None and len(self._memory) + len(view) <= SMALL_VALUE:
            self._memory += view
        else:
            with self._disk():
                if self._file is None:
                    self._file = open(self._partial, "wb")
                    self._file.write(self._memory)
                for start in range(0, len(view), _PIECE):
                    self._file.write(view[start : start + _PIECE])
                    self.taken += 1
        self.taken += len(view)
        return len(view)

    def close(self) -> bytes | None:
        """Return the pickled value if it is small. Otherwise, complete its file and return ``None``."""
        if self._file is None:
            return bytes(self._memory)
        with self._disk():
            self._file.close()
            self._partial.replace(self._path)
        return None

    def discard(self) -> None:
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = ""
            with suppress(OSError):
                free = f", {size(shutil.disk_usage(self._path.parent).free)} are free there"
            raise _DiskError(f"{error.strerror}{free}") from error


@contextmanager
def deadline(seconds: float, late: Callable[[], object]) -> Iterator[None]:
    """Call ``late`` in another thread if the ``with`` block has not ended after a number of seconds."""
    timer = threading.Timer(seconds, late)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started, so there is no deadline
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Handle a signal that comes during the ``with`` block after it."""
    came: list[int] = []
    handler = signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one of C code
        if came:
            signal.raise_signal(number)


@contextmanager
def _progress(spill: _Spill, late: Callable[[], object]) -> Iterator[None]:
    """Call ``late`` in another thread if ``spill`` gets no data for :data:`VALUE_PATIENCE` seconds in the block."""
    done = threading.Event()

    def look() -> None:
        taken = -1
        while spill.taken != taken:
            taken = spill.taken
            if done.wait(VALUE_PATIENCE):
                return
        late()

    watcher = threading.Thread(target=look, daemon=True)
    with suppress(RuntimeError):
        watcher.start()
    try:
        yield
    finally:
        done.set()


def _name(error: BaseException) -> str:
    kind = type(error)
    bare = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if bare else f"{kind.__module__}.{kind.__qualname__}"


def _summary(error: BaseException) -> str:
    """Return an exception's type and the first line of its message, without notes."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = ["<str() failed>"]
    return f"{_name(error)}: {lines[0]}" if lines else _name(error)


def _frames(error: BaseException) -> str:
    """Return an exception's traceback without its message, since asking for the message may run user code."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return shortened(f"Traceback (most recent call last):\n{frames}{_name(error)}\n", _TRACEBACK)


def printed(error: BaseException) -> str:
    """Return what Python prints for an exception.

    Before Python 3.12, ``traceback`` leaves out suggestions such as ``Did you mean: 'print'?``; the interpreter adds
    them.
    """
    if sys.version_info >= (3, 12) or not isinstance(error, (AttributeError, NameError)):
        return "".join(traceback.format_exception(error))
    with redirect_stderr(io.StringIO()) as text:
        sys.__excepthook__(type(error), error, error.__traceback__)
    return text.getvalue() or "".join(traceback.format_exception(error))
