"""Make all ranks stop at the same step, without a collective.

Before a rank goes on with a step, it names the step in the vote file. To stop the ranks, the driver proposes a step.
An agent accepts it if none of its ranks has reached it. Once all agents have accepted, all ranks stop there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from distributor.errors import ConfigurationError, StopError
from distributor.stopping.vote_file import NONE, Head, VoteFile
from distributor.values.checks import as_whole

PATIENCE = 60.0  # seconds that a rank waits at a proposed step to learn whether all nodes have agreed

_LOOK = 0.005  # seconds between two reads of the vote file while a rank waits

_LARGEST = 1 << 62


def answer(step: int, head: Head) -> bool | None:
    """Return whether a rank stops at a step; ``None`` if all nodes must first agree to stop there.

    >>> answer(7, Head()), answer(7, Head(proposed=8)), answer(8, Head(proposed=8)), answer(9, Head(8, agreed=8))
    (False, False, None, True)
    """
    if head.proposed == NONE or step < head.proposed:
        return False
    return True if head.agreed == head.proposed else None


class Stopper:
    """Tells a rank whether it must stop. ``ignores`` says whether a fork of the rank survives SIGTERM."""

    def __init__(
        self,
        vote_file: VoteFile,
        local_rank: int,
        patience: float = PATIENCE,
        ignores: Callable[[], bool] = lambda: False,
    ) -> None:
        self._vote_file = vote_file
        self._local_rank = local_rank
        self._patience = patience
        self._ignores = ignores
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a signal handler may ask while it interrupts a call
        self._handles = False
        self._halted = False

    def should_stop(self, step: int) -> bool:
        """Return whether the rank stops at a step; ``False`` in a fork of the rank.

        StopError if the driver did not decide in time, OSError if the node's folder has been removed.
        """
        if os.getpid() != self._owner:
            return False
        self._watch_signal()
        end: float | None = None
        while (stops := self._ask(step)) is None:
            end = time.monotonic() + self._patience if end is None else end
            if time.monotonic() > end:
                raise StopError(
                    f"the ranks were asked to stop at step {step} or before, but the driver did not say within "
                    f"{self._patience:g} s whether all nodes agree to stop there"
                )
            time.sleep(_LOOK)
        return stops

    def _ask(self, step: int) -> bool | None:
        with self._lock, self._vote_file.locked():
            self._vote_file.name_step(self._local_rank, step)
            stops = answer(step, self._vote_file.head())
            if stops and not self._halted:
                self._vote_file.halt(self._local_rank, step)
                self._halted = True
            return stops

    def _watch_signal(self) -> None:
        """From now on, let SIGTERM ask all ranks to stop together, unless user code handles it."""
        handler = signal.getsignal(signal.SIGTERM)
        is_main = threading.current_thread() is threading.main_thread()
        if handler is signal.SIG_DFL and is_main and self._vote_file.head().linked:
            signal.signal(signal.SIGTERM, self._on_signal)
            handler = self._on_signal
        handles = handler == self._on_signal
        if handles != self._handles:
            self._handles = handles
            self._vote_file.handle(self._local_rank, handles)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            if self._ignores():
                return
        elif (head := self._vote_file.head()).linked and not head.ending:
            self._vote_file.preempt(self._local_rank)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


_stopper: Stopper | None = None


def begin(path: Path, local_rank: int, ignores: Callable[[], bool]) -> None:
    """Begin to read in the vote file when this rank must stop. ``ignores`` is as for :class:`Stopper`."""
    global _stopper
    _stopper = Stopper(VoteFile(path), local_rank, ignores=ignores)


def should_stop(step: Any) -> bool:
    """Return whether this rank stops at a step; ``False`` if this process is not a rank."""
    number = step if type(step) is int else as_whole(step)
    if number is None:
        raise ConfigurationError(f"should_stop(): step must be a whole number, not {step!r:.100}")
    if not 0 <= number < _LARGEST:
        raise ConfigurationError(f"should_stop(): step must be 0 or more, not {number!r}")
    return _stopper is not None and _stopper.should_stop(number)
