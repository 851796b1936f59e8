"""Runs of Ray, JAX, MPI and TensorFlow that start again in a new job after a loss."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paths
import pytest
import victims
import watch
from leftovers import Leftovers
from sessions import LOCAL, MASTERS

from distributor import Status

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif({*paths.installed()} <= {*paths.PATHS}, reason="no launch path but torchrun's is installed"),
]

KILLS = victims.with_companions()

#: What is killed of each path: first what CI kills, then what ``make test-long`` kills.
OFTEN = [("mpich", LOCAL, "rank")]
CASES = [
    *OFTEN,
    *[
        pytest.param(path, mode, victim, marks=pytest.mark.long)
        for path in paths.OTHERS
        for mode, kinds in ((LOCAL, ("rank", "agent", "companion")), (MASTERS[-1], ("rank", "agent", "executor")))
        for victim in kinds
        if (path, mode, victim) not in OFTEN and (victim != "companion" or path in ("ray", "mpich", "openmpi"))
    ],
]


def train(training: Callable[..., Any], folder: str) -> Any:
    """Trains until it is killed; five steps where it was started again."""
    from distributor import runtime

    return training(folder, 10**9 if runtime.attempt() == 0 else 5)


@pytest.mark.ci
@pytest.mark.parametrize(("path", "mode", "victim"), CASES, indirect=["mode"])
def test_a_run_goes_on_in_a_new_job(
    path: str,
    mode: str,
    victim: str,
    local: bool,
    tmp_path: Path,
    leftovers: Leftovers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if path not in paths.installed():
        pytest.skip(f"{paths.OTHERS[path][0]} is not installed")
    ranks = max(2, paths.least(path))
    distributor = paths.distributor(path, ranks, local, max_restarts=1, grace_period=2)
    run = distributor.submit(train, paths.training(path), str(tmp_path))
    victims.await_ranks(path, ranks, tmp_path)
    find, text = KILLS[victim]
    find(run).kill()
    assert run.results(3 * watch.DEADLINE) == paths.values(path, ranks, 5)
    assert run.status is Status.SUCCEEDED
    assert "starting again in a new job (restart 1 of at most 1): " in caplog.text
    lost, last = run.attempts
    assert lost.reason is not None and last.reason is None
    assert re.search(text, lost.reason)
    leftovers.gone(run.id)
