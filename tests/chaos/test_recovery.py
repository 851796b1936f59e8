"""Trainings whose ranks, agents, workers and executors are killed at random end with the bits of an undisturbed one."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import checkpointed
import psutil
import pytest
import victims
import watch
from sessions import LOCAL, MASTERS, Make

from distributor import Checkpoints, Run

#: Steps between two kills, at most.
_STEPS = 6


#: Executors take long to come back, so they are killed less often.
WEIGHTS = {"rank": 6, "agent": 3, "worker": 2, "executor": 1}


def reached(run: Run) -> int:
    """The last step that was reported in the latest attempt, unless that has ended; otherwise -1."""
    rows = [row for row in run.metrics if row.step is not None]
    alive = [row.step for row in rows if row.attempt == len(run.attempts) and row.step is not None]
    return max(alive, default=-1)


def kill_something(run: Run, chance: random.Random, names: list[str]) -> str:
    """Kills something of a run that trains, and waits until the run has noticed."""
    ended, name = len(run.attempts), chance.choices(names, [WEIGHTS[name] for name in names])[0]
    while len(run.attempts) == ended:
        with suppress(psutil.Error, StopIteration, KeyError, ValueError):  # it has just ended by itself, or begun
            victims.FINDS[name](run).kill()
            with suppress(AssertionError):
                watch.until(lambda: len(run.attempts) > ended or run.wait(0), 10.0)
        assert not run.wait(0), "the run has ended"
    return name


@pytest.mark.long
@pytest.mark.timeout(60 * watch.DEADLINE)
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.long)], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize(
    "mode",
    [pytest.param(LOCAL, marks=pytest.mark.long), pytest.param(MASTERS[-1], marks=pytest.mark.spark)],
    indirect=True,
)
def test_trainings_killed_at_random_end_with_the_same_weights(
    make: Make, mode: str, split: bool, kills: int, tmp_path: Path
) -> None:
    """Seeds are those of the numbers of kills, so that a failure can be seen again."""
    names = ["rank", "agent"] if mode == LOCAL else [*victims.FINDS]
    chance, steps = random.Random(kills), (kills + 2) * _STEPS
    _, undisturbed, _ = make(2, checkpoints=tmp_path / "undisturbed").run(checkpointed.train_digits, steps, None, split)
    kept = Checkpoints(str(tmp_path / "killed"), memory=True)
    run = make(2, checkpoints=kept, max_restarts=3 * kills, grace_period=1.0).submit(
        checkpointed.train_digits, steps, None, split, pause=0.05
    )
    killed, target = [], 0
    for _ in range(kills):
        target = min(target + chance.randint(1, _STEPS), steps - _STEPS)
        watch.until(lambda target=target: reached(run) >= target)  # type: ignore[misc]
        killed.append(kill_something(run, chance, names))
    _, weights, seen = run.result(2 * watch.DEADLINE)
    assert (weights, seen) == (undisturbed, steps * 16), killed
    assert len(run.attempts) > kills
    watch.gone(run.id)
