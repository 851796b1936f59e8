"""Where a run trains: by local_mode, by the session, and by whether ranks use GPUs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from distributor import ConfigurationError
from distributor.api.scheduling import choose_session
from distributor.schedulers.spark import sessions

CLUSTER, LOCAL = SimpleNamespace(name="cluster"), SimpleNamespace(name="local[4]")


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("pyspark")
    session = request.param
    monkeypatch.setattr(sessions, "active_session", lambda: session)
    monkeypatch.setattr(sessions, "is_cluster", lambda session: session is CLUSTER)
    monkeypatch.setattr(sessions, "check_alive", lambda session: None)
    return session


@pytest.mark.parametrize(
    ("local_mode", "active", "use_gpu", "session", "here"),
    [
        (True, CLUSTER, False, None, True),
        (None, CLUSTER, False, CLUSTER, False),
        (None, LOCAL, False, None, True),
        (None, None, False, None, True),
        (False, CLUSTER, True, CLUSTER, False),
        (False, LOCAL, False, LOCAL, False),
        (False, LOCAL, True, None, True),  # tasks of a local master get no GPUs
    ],
    indirect=["active"],
)
def test_the_session_to_train_on(local_mode: bool | None, active: Any, use_gpu: bool, session: Any, here: bool) -> None:
    assert choose_session(local_mode, use_gpu) == (session, here)


@pytest.mark.parametrize("active", [None], indirect=True)
def test_spark_without_a_session_is_an_error_unless_only_planned(active: Any) -> None:
    with pytest.raises(ConfigurationError, match="there is no active Spark session"):
        choose_session(False)
    assert choose_session(False, needed=False) == (None, False)


def test_without_pyspark_ranks_train_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    assert choose_session(None) == (None, True)
