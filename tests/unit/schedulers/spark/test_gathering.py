"""Tasks that are just starting are not killed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distributor.schedulers.spark import classic, connect, gathering
from distributor.schedulers.spark.connect import StageProgress
from distributor.schedulers.spark.slots import Cluster


@pytest.mark.parametrize(
    ("running_for", "exchanged", "waits", "held_back"),
    [
        pytest.param(None, False, False, False, id="no-task-has-started"),
        pytest.param(1.0, False, False, True, id="tasks-are-starting"),
        pytest.param(1.0, True, False, False, id="tasks-have-the-facts-of-all"),
        pytest.param(gathering.CLASSIC + 1, False, False, False, id="tasks-have-begun-without-the-driver"),
        pytest.param(gathering.CLASSIC + 1, False, True, True, id="tasks-wait-for-one-that-unpacks-an-archive"),
    ],
)
def test_when_a_classic_session_kills_tasks(
    running_for: float | None, exchanged: bool, waits: bool, held_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(cancelJobsWithTag=killed.append))
    session = classic.ClassicSession(spark, Cluster("spark://host:7077", executor_cores=4))
    assert not session.cancel()  # there is no job yet
    monkeypatch.setattr("distributor.schedulers.spark.status.running_for", lambda *_: running_for)
    server: Any = SimpleNamespace(exchanged=exchanged, gathering=waits, reached=False)
    session._tag, session._server = "distributor-r1", server
    assert session.cancel() is held_back
    assert killed == ([] if held_back else ["distributor-r1"])


def test_when_a_connect_session_kills_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    killed: list[str] = []
    spark: Any = SimpleNamespace(interruptTag=killed.append)
    stage = SimpleNamespace(num_tasks=2)
    server: Any = SimpleNamespace(reached=False)
    session = connect.ConnectSession(spark)
    session._tag, session._server = "distributor-r1", server
    session._query = query = StageProgress(2)
    assert session.cancel()  # nothing is known of the query yet: its tasks may be starting
    query([stage], 0, "q", False)
    assert not session.cancel()  # it waits for slots
    query([stage], 1, "q", False)
    now += 5.0
    assert session.cancel()
    server.reached = True  # one task has left; each looks once a second
    assert session.cancel()
    now += gathering.LEAVING
    assert not session.cancel()
    server.reached, session._left = False, gathering.Left()
    now += gathering.CONNECT
    assert not session.cancel()
    assert killed == ["distributor-r1"] * 3
