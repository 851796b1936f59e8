"""JAX: ``jax.distributed.initialize()`` without arguments."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import launched
import pytest
import victims
import watch
from leftovers import Leftovers
from sessions import LOCAL, Make

from distributor import RunCancelledError, TrainingError

pytest.importorskip("jax")

pytestmark = pytest.mark.slow

#: The system in the table of docs/frameworks.md.
SYSTEM = ("JAX", "jax")


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "a sum over all processes")
@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_sum_over_all_processes(num_processes: int, make: Make) -> None:
    values = make(num_processes, launch="jax").submit(launched.jax_total).results(watch.DEADLINE)
    whole = float(sum(range(1, num_processes + 1)))
    assert values == [[whole, rank, num_processes, 1] for rank in range(num_processes)]


def fail_in_rank_1() -> None:
    import jax

    jax.distributed.initialize()
    if jax.process_index() == 1:
        raise ValueError("bad batch")
    time.sleep(600)


def meet_after_a_failure() -> None:
    """Rank 1 fails while the others are in a collective with it."""
    import jax
    from jax.experimental import multihost_utils

    jax.distributed.initialize()
    multihost_utils.sync_global_devices("begin")
    if jax.process_index() == 1:
        raise ValueError("bad batch")
    multihost_utils.sync_global_devices("end")


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "the first rank that fails")
@pytest.mark.parametrize("function", [fail_in_rank_1, pytest.param(meet_after_a_failure, marks=pytest.mark.long)])
def test_the_rank_that_failed_is_the_root(function: Any, make: Make) -> None:
    with pytest.raises(TrainingError, match=r"rank 1 on \S+ failed: ValueError: bad batch") as caught:
        make(2, launch="jax", grace_period=2).submit(function).result(watch.DEADLINE)
    assert caught.value.failures[0].rank == 1


#: Ranks by their numbers: rank 0 is the coordinator, whose end ends the others.
KILLS = ["0", "1", "launcher", "agent", "executor"]


@pytest.mark.framework(*SYSTEM, "the death of a process")
@pytest.mark.parametrize(("mode", "victim"), victims.cases(KILLS, ["1", "agent"], ["0", "executor"]), indirect=["mode"])
def test_nothing_is_left(victim: str, make: Make, tmp_path: Path, leftovers: Leftovers) -> None:
    run = make(2, launch="jax", grace_period=2).submit(launched.train_with_jax, str(tmp_path))
    victims.await_ranks("jax", 2, tmp_path)
    victims.strike(run, {**victims.KILLS, **victims.ranks("jax", 2, tmp_path)}[victim])
    leftovers.gone(run.id)


@pytest.mark.framework(*SYSTEM, "the death of the driver")
def test_a_killed_driver_leaves_nothing(tmp_path: Path, leftovers: Leftovers) -> None:
    victims.kill_a_driver("jax", LOCAL, 2, tmp_path, leftovers)


def stay(path: str) -> None:
    import signal
    from pathlib import Path

    import jax

    jax.distributed.initialize()
    signal.signal(signal.SIGTERM, lambda *_: (Path(f"{path}-{jax.process_index()}").touch(), os._exit(0)))
    Path(f"{path}-{jax.process_index()}-here").touch()
    time.sleep(600)


@pytest.mark.framework(*SYSTEM, "SIGTERM reaches the ranks")
def test_a_cancelled_run_gives_ranks_their_signal(make: Make, tmp_path: Any) -> None:
    run = make(2, launch="jax", grace_period=10).submit(stay, str(tmp_path / "saved"))
    watch.until(lambda: len(list(tmp_path.glob("*-here"))) == 2, watch.DEADLINE)
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(watch.DEADLINE)
    assert {path.name for path in tmp_path.glob("saved-?")} == {"saved-0", "saved-1"}


def begin() -> list[Any]:
    """Returns whether JAX was there at once, who forked the rank, and where this process listens."""
    import sys

    import psutil

    imported = "jax" in sys.modules
    import jax

    jax.distributed.initialize()
    process = psutil.Process()
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in process.net_connections("tcp")
        if connection.status == "LISTEN"
    }
    return [imported, watch.started_by(), sorted(listening)]


@pytest.mark.framework(*SYSTEM, "imported before the fork")
def test_a_warm_process_has_imported_jax_and_the_coordinator_listens_on_the_nodes_address(make_local: Make) -> None:
    first, second = make_local(2, launch="jax").submit(begin).results(watch.DEADLINE)
    assert first[0] is second[0] is True
    assert first[1] == second[1] != 0
    assert first[2] == ["127.0.0.1"]


def too_late() -> None:
    import jax

    jax.devices()
    jax.distributed.initialize()


def test_initializing_too_late_gets_advice(make_local: Make) -> None:
    with pytest.raises(TrainingError, match=r"Call jax\.distributed\.initialize\(\) first"):
        make_local(2, launch="jax").submit(too_late).result(watch.DEADLINE)


def test_a_warm_process_that_has_used_jax_is_not_forked(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "uses_jax.py").write_text("import jax\njax.devices()\n")
    options: dict[str, Any] = {"preload": ["uses_jax"], "env": {"PYTHONPATH": str(tmp_path)}}
    make_local(1, launch="jax", **options).run(launched.jax_total)
    assert "preload=['jax', 'uses_jax'] uses JAX, whose threads do not survive a fork" in caplog.text
