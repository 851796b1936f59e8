"""Ray Train and Ray Data on the nodes of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import launched
import paths
import pytest
import victims
import watch
from leftovers import Leftovers
from sessions import LOCAL, Make

from distributor import TrainingError

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

#: The system in the table of docs/frameworks.md.
SYSTEM = ("Ray Train", "ray")

LAUNCH = paths.LAUNCHES["ray"]


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "the Ray cluster has all nodes of the run")
def test_each_node_offers_its_slots(make: Make, mode: str, leftovers: Leftovers) -> None:
    options: dict[str, Any] = {"cpus_per_process": 1} if mode == LOCAL else {"max_processes_per_node": 1}
    run = make(2, launch=LAUNCH, **options).submit(launched.ray_nodes)
    addresses, cpus = run.result(2 * watch.DEADLINE)
    assert (len(addresses), cpus) == ((1, 2.0) if mode == LOCAL else (2, 2.0))
    assert run.results() == [run.result()]
    leftovers.gone(run.id)


@pytest.mark.long
@pytest.mark.framework(*SYSTEM, "TorchTrainer with Ray Data")
def test_torch_trainer_with_ray_data(make: Make, tmp_path: Path, leftovers: Leftovers) -> None:
    run = make(3, launch=LAUNCH).submit(launched.train_with_ray_train, str(tmp_path), 2)
    launched.assert_trained(run.result(4 * watch.DEADLINE), 2)
    leftovers.gone(run.id)


def fail_as_driver() -> None:
    import ray

    ray.init()
    raise ValueError("bad batch")


def fail_in_a_task() -> None:
    import ray

    @ray.remote
    def task() -> None:
        raise ValueError("bad batch")

    ray.get(task.remote())


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "the first failure of a task or function")
@pytest.mark.parametrize("function", [pytest.param(fail_as_driver, marks=pytest.mark.long), fail_in_a_task])
def test_a_failure_of_a_task_or_function_is_the_error(function: Any, make: Make, leftovers: Leftovers) -> None:
    run = make(2, launch=LAUNCH, grace_period=2).submit(function)
    with pytest.raises(TrainingError, match="bad batch"):
        run.result(2 * watch.DEADLINE)
    leftovers.gone(run.id)


def stay(path: str) -> None:
    import ray

    ray.init()
    Path(path).touch()
    time.sleep(600)


#: A program of another user of the machine, which knows the address only.
STRANGER = """
import sys, ray
ray.init(address=sys.argv[1])
print("inside:", ray.get(ray.remote(lambda: 1).remote()))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "access", [{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_MODE": "disabled"}]
)
def test_refuses_a_ray_client_without_the_token(
    access: dict[str, str], make_local: Make, tmp_path: Path, leftovers: Leftovers
) -> None:
    def wait(ready: str, go: str) -> int:
        ray.init()
        new = Path(f"{ready}.new")
        new.write_text(os.environ["RAY_ADDRESS"])
        new.rename(ready)
        while not os.path.exists(go):
            time.sleep(0.05)
        return int(ray.get(ray.remote(lambda: 7).remote()))

    ready, go = tmp_path / "ready", tmp_path / "go"
    run = make_local(1, launch=LAUNCH).submit(wait, str(ready), str(go))
    watch.until(ready.exists, 2 * watch.DEADLINE)
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, ready.read_text()],
        env={**os.environ, "HOME": str(tmp_path), **access},
        capture_output=True,
        text=True,
        timeout=4 * watch.DEADLINE,
    )
    go.touch()
    assert stranger.returncode != 0
    assert "inside" not in stranger.stdout
    assert "token" in stranger.stderr.lower()
    assert run.result(2 * watch.DEADLINE) == 7  # those with the token come in meanwhile
    leftovers.gone(run.id)


@pytest.mark.long
def test_a_process_that_is_connected_to_ray_is_not_forked(tmp_path: Path) -> None:
    code = (
        "import ray; from distributor.machine import forks; first = forks._started_runtime();"
        "ray.init(num_cpus=1, include_dashboard=False); print([first, forks._started_runtime()]); ray.shutdown()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=4 * watch.DEADLINE,
        check=True,
    )
    assert done.stdout.endswith("[None, 'Ray']\n")


KILLS = victims.with_companions(
    head=victims.program(*victims.HEAD),
    raylet=victims.program("raylet"),
    ray_start=victims.program("ray.scripts.scripts"),
)


@pytest.mark.framework(*SYSTEM, "the death of a process")
@pytest.mark.parametrize(
    ("mode", "victim"),
    victims.cases(["none", *KILLS], ["none", "head", "rank", "agent"], ["raylet", "companion", "executor"]),
    indirect=["mode"],
)
def test_nothing_is_left(victim: str, make: Make, tmp_path: Path, leftovers: Leftovers) -> None:
    run = make(2, launch=LAUNCH, grace_period=2).submit(launched.train_with_ray, str(tmp_path))
    victims.await_ranks("ray", 2, tmp_path)
    victims.strike(run, KILLS.get(victim))
    leftovers.gone(run.id)


@pytest.mark.ci
@pytest.mark.framework(*SYSTEM, "the death of the driver")
def test_a_killed_driver_leaves_nothing(tmp_path: Path, leftovers: Leftovers) -> None:
    victims.kill_a_driver("ray", LOCAL, 2, tmp_path, leftovers)
