"""A cluster whose hosts can be cut off."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import paths
import pytest
from hosts import Hosts, require
from sessions import LOCAL, MASTERS, Make, Sessions


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The DeepSpeed path is tried on one node and on two executors; the launch path makes no difference to Spark.

    What takes long, a driver's end and hosts that are cut off, is tried once for it. CI kills a rank of it here;
    ``make test`` kills nothing of it. On executors, CI kills ranks, agents and executors.
    """
    for item in list(items):
        values = getattr(getattr(item, "callspec", None), "params", {})
        name = getattr(item, "originalname", "")
        if values.get("path") == "torchrun" and values.get("mode") == MASTERS[-1]:
            if values.get("victim") in ("launcher", "data-loader worker", "worker"):
                item.add_marker(pytest.mark.long)
            if name == "test_nothing_outlives_the_driver":
                item.add_marker(pytest.mark.slow)
        if values.get("path") != "deepspeed":
            continue
        if name in ("test_hosts_that_are_all_cut_off_end_by_themselves", "test_a_short_cut_is_survived") or (
            name == "test_nothing_outlives_the_driver"
            and values != {"path": "deepspeed", "mode": LOCAL, "number": signal.SIGKILL}
        ):
            items.remove(item)
        elif (values.get("mode"), values.get("victim")) == (LOCAL, "rank"):
            item.add_marker(pytest.mark.slow)
        else:
            item.add_marker(pytest.mark.long)


@pytest.fixture(params=paths.PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """The launch path."""
    if request.param == "deepspeed":
        request.getfixturevalue("deepspeed")
    return str(request.param)


@pytest.fixture
def make_on_path(path: str, local: bool) -> Make:
    """Makes a distributor of the launch path for the mode."""
    return lambda num_processes=2, **options: paths.distributor(path, num_processes, local, **options)


@pytest.fixture
def cluster(sessions: Sessions) -> Iterator[Hosts]:
    """Two hosts with a worker of two cores each; no session yet."""
    require()
    sessions.stop()
    with Hosts() as hosts:
        yield hosts
