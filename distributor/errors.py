"""Every exception the package raises, in one tree.

::

    DistributorError (RuntimeError)
    ├── ConfigurationError (ValueError)   bad input; raised before any process or Spark job starts
    │   ├── PayloadError                  the function, script or folder cannot be shipped
    │   └── ResourceError                 slots or GPUs that are not there
    ├── StartError                        the run could not start (executors or nodes that never came, no torch there)
    ├── TrainingError                     a rank failed: which, where, why, and its traceback
    │   ├── NodeLostError                 a node went away with its ranks
    │   └── StallError                    ranks did nothing for stall_timeout; what each was doing
    ├── ResultError                       ranks succeeded, but a value could not be brought back
    └── RunCancelledError                 the run was cancelled

``DistributorError`` is a ``RuntimeError`` and ``ConfigurationError`` a ``ValueError`` because those are what
``pyspark.ml.torch.distributor`` raises: code written for it keeps its ``except`` clauses.
All of them can be pickled.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distributor.text import cells
from distributor.text.wording import shortened

if TYPE_CHECKING:
    from distributor.values.outcome import Failure


#: Characters of an error that a notebook shows. ``str(error)`` has all.
_LONGEST_IN_CELLS = 20_000

#: ``__cause__`` as C code has it.
_CAUSE: Any = vars(BaseException)["__cause__"]


class DistributorError(RuntimeError):
    """Base of all errors of this package."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows for it, instead of all frames.

        Source: ``IPython.core.interactiveshell.InteractiveShell.showtraceback``.
        """
        return _shortly(self)


def show_shortly(error: BaseException) -> None:
    """Has IPython show an exception of somebody else's as it shows those of this package."""
    with suppress(AttributeError):  # some of those that are written in C take none
        error._render_traceback_ = lambda: _shortly(error)  # type: ignore[attr-defined]


def _shortly(error: BaseException) -> list[str]:
    """What happened, and where in the user's code, without the way through this package."""
    package = os.path.dirname(__file__) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    own = next((index for index, frame in enumerate(frames) if frame.filename.startswith(package)), len(frames))
    where = cells.readable("".join(traceback.format_list(frames[:own][-1:])))  # the line that called
    told = shortened(f"{type(error).__name__}: {error}".rstrip(": "), _LONGEST_IN_CELLS)
    return [told, *(["", "raised by", where] if where else [])]


class ConfigurationError(DistributorError, ValueError):
    """The request is wrong. Raised before any process or Spark job starts."""


class PayloadError(ConfigurationError):
    """What should be trained cannot be shipped: not picklable, not found, or too large."""


class ResourceError(ConfigurationError):
    """More slots or GPUs are asked for than there are."""


class StartError(DistributorError):
    """The run could not start: executors that did not come in time, or nodes that cannot run torch."""


class TrainingError(DistributorError):
    """A rank failed; every other rank was stopped.

    The text begins with what happened (``rank 1 on host-b failed: ValueError: ...``), followed by that
    rank's traceback. ``__cause__`` is the original exception where it could be unpickled; Python does not print it,
    since the text has told it.

    Attributes:
        failures: all failures, the root first, then those it may have caused, in order of time.
        rank, local_rank, host: where the root failure happened (``None`` if no rank can be named).
        exit_code: the rank's exit code, or ``None`` if a signal ended it.
        signal: the signal's name (``"SIGKILL"``), or ``None``.
        traceback: the rank's own traceback as text, ``""`` if there is none.
        log_tail: the end of what the rank wrote; stdout and stderr as they were read, twenty times a second.

    Example:
        >>> from distributor import TorchDistributor, TrainingError
        >>> try:
        ...     TorchDistributor(4, use_gpu=False).run(train)  # doctest: +SKIP
        ... except TrainingError as error:
        ...     print(error.rank, error.host, error.exit_code)
    """

    __slots__ = ("_original",)  # no part of __dict__, which is pickled: exceptions may not survive that

    def __init__(self, message: str, failures: Sequence[Failure] = (), original: BaseException | None = None) -> None:
        super().__init__(message)
        self._original = original
        self.failures: tuple[Failure, ...] = tuple(failures)
        root = self.failures[0] if self.failures else None
        self.rank: int | None = root.rank if root else None
        self.local_rank: int | None = root.local_rank if root else None
        self.host: str | None = root.host if root else None
        self.exit_code: int | None = root.exit_code if root else None
        self.signal: str | None = root.signal if root else None
        self.traceback: str = root.traceback if root else ""
        self.log_tail: str = root.log_tail if root else ""

    @property
    def __cause__(self) -> BaseException | None:
        """The original exception, unless another was set; none for Python's own printer of tracebacks.

        What the interpreter and ``logging`` print would begin with it, although this text has it with its traceback.
        Until Python 3.12, the interpreter prints what C code has as the cause; later, it asks the module ``traceback``.
        """
        cause: BaseException | None = _CAUSE.__get__(self)
        if cause is not None or sys._getframe(1).f_globals.get("__name__") == traceback.__name__:
            return cause
        return getattr(self, "_original", None)

    @__cause__.setter
    def __cause__(self, cause: BaseException | None) -> None:
        _CAUSE.__set__(self, cause)


class NodeLostError(TrainingError):
    """A node (Spark executor, or this machine's agent) went away while its ranks were running."""


class StallError(TrainingError):
    """No rank wrote anything or used CPU time for ``stall_timeout`` seconds; all were stopped.

    Attributes:
        stacks: what each rank was doing, as ``run.dump_stacks()`` returns it.
    """

    def __init__(
        self, message: str, failures: Sequence[Failure] = (), stacks: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        super().__init__(message, failures)
        self.stacks = dict(stacks)


class ResultError(DistributorError):
    """Training succeeded, but a return value could not be pickled, sent or read."""


class RunCancelledError(DistributorError):
    """The run was cancelled: by ``run.cancel()``, Ctrl-C, or Spark."""
