"""What each task of a job must know of the others.

Pickled by value into Spark's Python workers, where other packages may be missing: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributor.values.messages import Placed, TaskFacts


def among(everyone: Sequence[TaskFacts]) -> list[Placed]:
    """Return what each task must know of the others; all by partition."""
    leaders: dict[str, str] = {}
    for task in everyone:
        leaders.setdefault(task.facts.executor, task.held)
    return [Placed(leaders[task.facts.executor]) for task in everyone]
