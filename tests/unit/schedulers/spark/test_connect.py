"""How a run on Spark Connect is sent, placed again and cancelled, without a session."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import watch
from jobs import changed, make_job

from distributor.channel.result_receiver import ResultReceiver
from distributor.errors import RunCancelledError, StartError
from distributor.launch.torchrun import Torchrun
from distributor.schedulers.spark import connect
from distributor.schedulers.spark.connect import ConnectSession, StageProgress
from distributor.schedulers.spark.rows import CROWDED
from distributor.values.job import Function, StatusDetail, WorkingDir

JOB = make_job("3f2a", node_limit=1)
SERVER: Any = SimpleNamespace(receiver=ResultReceiver(limit=0), reached=False)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> ConnectSession:
    """A session whose queries are placed badly twice, and then well."""
    left = [[CROWDED, CROWDED], [CROWDED], [b"Lhost-b"]]
    made = ConnectSession(cast(Any, SimpleNamespace(interruptTag=lambda tag: None)))
    monkeypatch.setattr(made, "_submit", lambda *_: left.pop(0))
    return made


def test_a_bad_placement_is_tried_again(
    session: ConnectSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "_PLACE_AGAIN", 0.001)
    session.await_slots(JOB)
    assert session.collect(JOB, cast(Any, None), SERVER).lost_hosts == ("host-b",)
    assert session.waiting_for(JOB) is None
    told = "Spark put more ranks on an executor than the 1 that it may host; placing run 3f2a again"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_bad_placements_end_with_the_start_timeout(session: ConnectSession) -> None:
    job = make_job("3f2a", node_limit=1, start_timeout=0.0)
    with pytest.raises(StartError, match=r"start_timeout=0 s: Spark put more ranks on an executor .* 1 times"):
        session.collect(job, cast(Any, None), SERVER)


def test_a_cancelled_run_is_not_placed_again(session: ConnectSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_PLACE_AGAIN", 3600.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.collect, JOB, cast(Any, None), SERVER)
        watch.until(lambda: session.waiting_for(JOB) == StatusDetail("waiting for slots on other executors"))
        assert session.cancel() is False
        with pytest.raises(RunCancelledError, match="run 3f2a was cancelled while it waited for slots"):
            waiting.result(watch.DEADLINE)


SHIPPED = make_job("r1", 2, Function("train", b"pickled"), False, launch=Torchrun())


class Remote:
    """The session of a client, which counts what is sent."""

    def __init__(self) -> None:
        self.sent: dict[str, bytes] = {}
        self.told: list[StatusDetail | None] = []
        self.interrupted: list[str] = []
        self.session = connect.ConnectSession(self)

    def addArtifacts(self, path: str, file: bool) -> None:
        assert file
        assert Path(path).name not in self.sent
        self.sent[Path(path).name] = Path(path).read_bytes()
        self.told.append(self.session.waiting_for(SHIPPED))

    def interruptTag(self, tag: str) -> None:
        self.interrupted.append(tag)


def test_large_parts_are_sent_once_and_under_names_of_their_own() -> None:
    remote = Remote()
    archive, content = b"x" * (1 << 20) + b"x", b"y" * (1 << 20) + b"y"
    with tempfile.TemporaryFile() as file:
        file.write(content)
        large = changed(SHIPPED, target=Function("train", file), working_dir=WorkingDir("project", archive))
        first, again = remote.session.deliver(large), remote.session.deliver(large)
    assert first == again
    assert remote.sent[first.parts["working_dir"]] == archive
    assert remote.sent[first.call] == content
    assert isinstance(first.job.target, Function)
    assert first.job.target.pickled == b""
    assert isinstance(first.package, str)
    assert remote.sent[first.package].startswith(b"PK")
    assert [str(step).partition(" ")[0] for step in remote.told] == ["sending"] * 3
    assert remote.session.waiting_for(SHIPPED) is None
    small = remote.session.deliver(SHIPPED)
    assert (small.call, small.parts) == (None, {})


def test_a_query_is_cancelled_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote()
    monkeypatch.setattr(remote.session, "_submit", lambda *_: [b"Lhost"])
    assert remote.session.collect(SHIPPED, None, SERVER).lost_hosts == ("host",)
    remote.session.cancel()
    assert remote.interrupted == ["distributor-r1"]


def test_nothing_is_submitted_after_a_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the code is still being sent to the server."""
    remote = Remote()
    remote.session.cancel()
    assert remote.interrupted == []
    monkeypatch.setattr(remote.session, "_submit", lambda *_: pytest.fail("submitted"))
    with pytest.raises(RunCancelledError):
        remote.session.collect(SHIPPED, None, SERVER)


def test_progress_tells_whether_tasks_have_started() -> None:
    progress = StageProgress(2)
    stage, other = SimpleNamespace(num_tasks=2), SimpleNamespace(num_tasks=3)
    progress([other], 3, "q", False)
    assert not progress.waiting
    progress([stage], 0, "q", False)
    assert progress.waiting
    progress([stage], 1, "q", False)
    progress([stage], 0, "q", False)
    assert not progress.waiting
