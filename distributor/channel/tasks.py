"""What each task of a job must know of the others.

Pickled by value into Spark's Python workers, where other packages may be missing: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributor.values.messages import Placed, TaskFacts


def choose_roles(executors: Sequence[str]) -> tuple[int, int | None] | None:
    """Return the partitions of holder and courier (``schedulers/spark/holder.py``); ``None`` for one task alone.

    A sibling has no rows, so it needs no courier. Without siblings, partition 0 holds, and 1 takes its rows on its own
    listening socket: on that of 0, torch's rendezvous store listens.
    """
    leaders = {executor: partition for partition, executor in reversed([*enumerate(executors)])}
    siblings = [partition for partition, executor in enumerate(executors) if leaders[executor] != partition]
    if siblings:
        return siblings[-1], None
    return (0, 1) if len(executors) > 1 else None


def among(everyone: Sequence[TaskFacts]) -> list[Placed]:
    """Return what each task must know of the others; all by partition."""
    leaders: dict[str, str] = {}
    for told in everyone:
        leaders.setdefault(told.facts.executor, told.held)
    roles = choose_roles([told.facts.executor for told in everyone])
    courier = None if roles is None or roles[1] is None else everyone[roles[1]].facts
    at = None if courier is None else (courier.address, courier.port)
    return [Placed(leaders[told.facts.executor], at) for told in everyone]
