"""How an attempt of a run ended, as users read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EndedAttempt:
    """An attempt that has ended.

    Attributes:
        number: the attempt's number, from 0.
        seconds: how long it took.
        reason: why it ended, in one line; ``None`` if it succeeded.
    """

    number: int
    seconds: float
    reason: str | None
