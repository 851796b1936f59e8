"""All exceptions that the package defines for its users, in one tree.

::

    DistributorError (RuntimeError)
    ├── ConfigurationError (ValueError)   bad input; if possible, raised before any process or Spark job starts
    │   ├── PayloadError                  the function, script or folder cannot be shipped
    │   └── ResourceError                 more slots, GPUs, CPUs or memory requested than available
    ├── StartError                        the run could not start (missing executors or nodes, or nodes without torch)
    ├── CompanionError                    a process that runs beside the ranks, such as Ray's, ended before them
    ├── TrainingError                     a rank failed; says which one, where and why, and has its traceback
    │   ├── NodeLostError                 a node was lost with its ranks
    │   └── StallError                    no rank was active for stall_timeout; has the stacks of all ranks
    ├── GroupError                        ranks trained, but not together (only with require_group=True)
    ├── PreemptionError                   ranks had to end early, and stopped together (should_stop)
    ├── StopError                         ranks did not all stop at the same step
    ├── ResultError                       ranks succeeded, but a return value could not be brought to the driver
    └── RunCancelledError                 the run was cancelled

``pyspark.ml.torch.distributor`` raises ``RuntimeError`` and ``ValueError``. ``DistributorError`` and
``ConfigurationError`` are derived from these built-in exceptions, so that code written for PySpark can keep its
``except`` clauses. All exceptions of this package can be pickled.
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


#: Maximum number of characters that a notebook shows of an error. ``str(error)`` has the full text.
_LONGEST_IN_CELLS = 20_000

#: The built-in descriptor of ``BaseException.__cause__``, which reads and writes the cause that CPython stores in an
#: exception. The property ``TrainingError.__cause__`` hides this descriptor.
_CAUSE: Any = vars(BaseException)["__cause__"]


class DistributorError(RuntimeError):
    """Base class of all errors of this package."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows for this error, instead of a traceback with all frames.

        Source: ``IPython.core.interactiveshell.InteractiveShell.showtraceback``.
        """
        return _shortly(self)


def show_shortly(error: BaseException) -> None:
    """Make IPython show an exception as briefly as this package's own errors."""
    with suppress(AttributeError):  # some exceptions written in C accept no attributes
        error._render_traceback_ = lambda: _shortly(error)  # type: ignore[attr-defined]


def _shortly(error: BaseException) -> list[str]:
    """Return lines that show the error and the line of user code that called this package, but no other frames."""
    package = os.path.dirname(__file__) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    first_own = next((index for index, frame in enumerate(frames) if frame.filename.startswith(package)), len(frames))
    where = cells.readable("".join(traceback.format_list(frames[:first_own][-1:])))  # the calling line
    text = shortened(f"{type(error).__name__}: {error}".rstrip(": "), _LONGEST_IN_CELLS)
    return [text, *(["", "raised by", where] if where else [])]


class ConfigurationError(DistributorError, ValueError):
    """An argument, an option or a setting is wrong, or something that the call needs, such as a package, is missing.

    If possible, the error is raised before any process or Spark job starts.
    """


class PayloadError(ConfigurationError):
    """What a run needs cannot be shipped to its ranks.

    For example, the function is not picklable, the script, module or folder is not found, or a folder is too large.
    """


class ResourceError(ConfigurationError):
    """More slots, GPUs, CPUs or memory are requested than are available."""


class StartError(DistributorError):
    """The run could not start: for example, executors did not come up in time, or nodes cannot import torch.

    This error also ends a run that has started, if the driver or a node then lacks something that it needs to go on,
    such as disk space or Spark's JVM, or if the driver itself fails.
    """


class CompanionError(DistributorError):
    """A companion, a process that a launch path such as Ray's runs beside the ranks, ended before the ranks.

    The error's text says which companion ended, where and how. Then come the last lines that the companion wrote. All
    ranks were stopped.
    """


class TrainingError(DistributorError):
    """A rank failed; every other rank was stopped.

    The error's text begins with what happened (``rank 1 on host-b failed: ValueError: ...``), followed by that rank's
    traceback, if there is one. ``__cause__`` is the rank's exception, without what cannot be pickled. Python does not
    print ``__cause__``, because the text already contains the exception.

    Attributes:
        failures: the failures of all ranks: first the root failure, then the failures that it may have caused, in
            order of time.
        rank, local_rank, host: where the root failure happened (``None`` if it cannot be tied to a rank).
        exit_code: exit code of the rank with the root failure, or ``None`` if a signal ended this rank.
        signal: name of the signal that ended the rank with the root failure (``"SIGKILL"``), or ``None`` if no signal
            ended this rank. ``exit_code`` and ``signal`` are both ``None`` if it is unknown how the rank ended.
        traceback: the traceback of the rank with the root failure, as text; ``""`` if there is none.
        log_tail: the last lines that the rank with the root failure wrote to stdout and stderr. Both are read 20 times
            a second, so lines of stdout and stderr that were written within 1/20 s of each other may be in the wrong
            order.

    Example:
        >>> from distributor import TorchDistributor, TrainingError
        >>> try:
        ...     TorchDistributor(4, use_gpu=False).run(train)  # doctest: +SKIP
        ... except TrainingError as error:
        ...     print(error.rank, error.host, error.exit_code)
    """

    # A slot keeps the original exception out of __dict__, which is pickled: the original may not be picklable.
    __slots__ = ("_original",)

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
        """The cause that was set with ``raise ... from``, or else the rank's exception if it could be unpickled.

        The text of a ``TrainingError`` already contains the rank's exception with its traceback. If the interpreter or
        ``logging`` printed this exception as the cause too, the exception would appear twice. ``logging``, and the
        interpreter from Python 3.13 on, use the module ``traceback`` to print tracebacks. This property hides the
        exception from that module. Earlier interpreters print a cause only if it is stored in the C object of the
        error. The rank's exception is not stored there.
        """
        cause: BaseException | None = _CAUSE.__get__(self)
        caller = getattr(sys, "_getframe", None)  # an interpreter without it prints the exception twice
        if cause is not None or (caller and caller(1).f_globals.get("__name__") == traceback.__name__):
            return cause
        return getattr(self, "_original", None)

    @__cause__.setter
    def __cause__(self, cause: BaseException | None) -> None:
        _CAUSE.__set__(self, cause)


class GroupError(DistributorError):
    """A rank trained, but never joined a process group of all ranks. Raised only with ``require_group=True``."""


class PreemptionError(DistributorError):
    """The run was preempted, and all ranks that call ``runtime.should_stop`` stopped at the same step.

    A run is preempted if a rank that calls ``runtime.should_stop`` gets SIGTERM, if its node does, or if Spark
    decommissions an executor. The ranks' return values are dropped, because the training has not finished.
    """


class StopError(DistributorError):
    """Ranks were asked to stop at the same step, but stopped at different steps.

    ``runtime.should_stop`` raises this error in a rank that does not learn in time whether all ranks stop at its step.
    The run's error is then a :class:`TrainingError`.
    """


class NodeLostError(TrainingError):
    """A node was lost before its ranks had ended, or Spark aborted the job for another reason.

    A node is a Spark executor or, in local mode, this machine. It counts as lost if its agent (the process that watches
    the ranks), its Python worker or its executor ended, or if it was cut off from the driver.
    """


class StallError(TrainingError):
    """No rank wrote output or used CPU time for ``stall_timeout`` seconds; all ranks were stopped.

    A rank that uses at most 2 % of one CPU counts as idle.

    Attributes:
        stacks: what each rank was doing: a dict with the text of the stacks of each rank's threads, by rank.
    """

    def __init__(
        self, message: str, failures: Sequence[Failure] = (), stacks: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        super().__init__(message, failures)
        self.stacks = dict(stacks)


class ResultError(DistributorError):
    """Training succeeded, but a rank's return value could not be pickled, sent or read."""


class RunCancelledError(DistributorError):
    """The run was cancelled.

    It was cancelled by ``run.cancel()``, ``run.kill()``, the timeout of ``run.stop()``, Ctrl-C or Spark, because its
    Spark session was stopped, or because another run of the same name took over.
    """
