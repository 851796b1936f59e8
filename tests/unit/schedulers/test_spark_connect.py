"""What a run on Spark Connect waits for before it submits its query."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import watch
from jobs import make_job

from distributor.errors import RunCancelledError
from distributor.schedulers.spark import connect
from distributor.schedulers.spark.connect import ConnectSession
from distributor.values.job import Step


def barrier() -> ConnectSession:
    """A session of which nothing is asked."""
    return ConnectSession(cast(Any, object()))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "KILLED_TASKS", 3600.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("attempt", "limit"), [(0, 1), (2, None)])
def test_a_first_job_and_a_job_without_a_limit_start_at_once(attempt: int, limit: int | None) -> None:
    session, job = barrier(), make_job(attempt=attempt, node_limit=limit)
    session.await_slots(job)
    assert session.waiting_for(job) is None


def test_tasks_of_the_previous_job_have_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    session, job = barrier(), make_job(attempt=1, node_limit=1)
    monkeypatch.setattr(session._cancelled, "wait", waited.append)
    session.await_slots(job)
    assert waited == [6.0]
    assert session.waiting_for(job) is None


@pytest.mark.usefixtures("patient")
def test_a_cancelled_run_waits_for_no_tasks() -> None:
    session, job = barrier(), make_job("3f2a", attempt=1, node_limit=1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.await_slots, job)
        watch.until(lambda: session.waiting_for(job) == Step("waiting for the tasks of the previous job to end"))
        assert session.cancel() is False
        with pytest.raises(RunCancelledError, match="run 3f2a was cancelled while it waited for slots"):
            waiting.result(watch.DEADLINE)
