"""The handle of a run beside its ranks: what it says of a driver that is out of reach, and views that do not work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
import watch

from distributor import RunCancelledError, Status, TrainingError, run as module
from distributor.channel.server import ChannelServer
from distributor.job import Failure, Job, Module, Node, NodeReport, Outcome
from distributor.outcomes import Collected
from distributor.views import Shown
from distributor.views.snapshot import Snapshot


class Scheduler:
    """Listens as Spark's does, and has no tasks."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.waits: str | None = "waiting for 2 slots: 1 free"
        self.asked = 0

    on_driver = False

    def thread(self, target: Any) -> threading.Thread:
        return threading.Thread(target=target)

    def run(self, job: Job, server: ChannelServer) -> Collected:
        server.listen("127.0.0.1", "127.0.0.1", None)
        self.ended.wait(watch.DEADLINE)
        return Collected()

    def cancel(self) -> None:
        self.ended.set()

    def waiting_for(self) -> str | None:
        self.asked += 1
        return self.waits


@contextmanager
def running(scheduler: Scheduler, view: Any = None) -> Iterator[module.Run]:
    run = module.Run(Job("3f2a", 2, Module("train"), False), scheduler, view=view)
    try:
        yield run
    finally:
        run.cancel()
        assert run.wait(watch.DEADLINE)
        assert run.status is Status.CANCELLED
        with pytest.raises(RunCancelledError):
            run.result()


def test_a_driver_that_no_node_reaches_says_so_once_tasks_have_had_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_UNREACHED", 0.02)
    scheduler = Scheduler()
    with running(scheduler):
        watch.until(lambda: scheduler.asked > 4)
        assert caplog.text == ""  # Spark may take long to start its tasks
        scheduler.waits = None
        watch.until(lambda: caplog.text)
    assert "no node has reached the driver at 127.0.0.1:" in caplog.text
    assert "driver_ports= names the ports to open" in caplog.text
    assert caplog.text.count("no node has reached") == 1


def test_what_a_run_waits_for_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    scheduler = Scheduler()
    with running(scheduler) as run:
        watch.until(lambda: run.snapshot().detail == "waiting for 2 slots: 1 free")
        before = scheduler.asked
        for _ in range(100):
            run.snapshot()
        assert scheduler.asked - before <= 2  # Spark is not asked each time


class Recorder:
    """A view that takes note of what it is shown."""

    interval = 0.01
    announces = False

    def __init__(self) -> None:
        self.shown: list[tuple[Snapshot, bool]] = []

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
        self.shown.append((snapshot, awaited))
        return Shown()


def test_the_last_that_a_view_is_shown_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # A display that is slow to close leaves a view time to show the end again.
    monkeypatch.setattr(module.Logs, "close", lambda logs: threading.Event().wait(20 * Recorder.interval))
    view = Recorder()
    with running(Scheduler(), view) as run:
        watch.until(lambda: len(view.shown) > 2)
        assert not any(awaited for _, awaited in view.shown)
        assert not run.wait(0.1)
        assert view.shown[-1][1]
    assert [snapshot.status for snapshot, _ in view.shown].count(Status.CANCELLED) == 1
    assert view.shown[-1][0].status is Status.CANCELLED


FAILED = NodeReport(0, "a", (Outcome(0, "a", "failed", Failure(0, 0, "a", "KeyError", "KeyError: 'lr'")),))


def test_advice_that_cannot_be_had_hides_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Scheduler):
        def run(self, job: Job, server: ChannelServer) -> Collected:
            return Collected((FAILED,))

    monkeypatch.setattr(module.advice, "advise", lambda *_: 1 / 0)
    run = module.Run(Job("3f2a", 1, Module("train"), False), Failing())
    with pytest.raises(TrainingError, match="KeyError: 'lr'"):
        run.result(watch.DEADLINE)


def test_what_has_failed_is_not_cancelled() -> None:
    class Failing(Scheduler):
        def run(self, job: Job, server: ChannelServer) -> Collected:
            super().run(job, server)
            return Collected((FAILED,))

    run = module.Run(Job("3f2a", 1, Module("train"), False, grace_period=600.0), Failing())
    run.on_event("a", {"event": "hello", "placement": [asdict(Node(0, "a", "a", "1", 1, 0, 0, 1))]})
    run.on_event("a", {"event": "failed"})
    run.cancel()
    assert run.status is Status.STOPPING
    run.kill()
    with pytest.raises(TrainingError, match="KeyError: 'lr'"):
        run.result(watch.DEADLINE)
    assert run.status is Status.FAILED


def test_an_end_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, go = threading.Event(), threading.Event()
    monkeypatch.setattr(module.Logs, "close", lambda logs: (closing.set(), go.wait(watch.DEADLINE)))
    scheduler = Scheduler()
    scheduler.ended.set()
    run = module.Run(Job("3f2a", 1, Module("train"), False), scheduler)
    assert closing.wait(watch.DEADLINE)
    ended = run.status
    assert ended is Status.FAILED
    run.cancel()
    run.kill()
    assert run.status is ended
    assert not any(timer.is_alive() for timer in run._timers if not timer.finished.is_set())
    go.set()
    assert run.wait(watch.DEADLINE)
    assert run.status is ended


def test_a_handle_is_live_until_the_end_was_shown() -> None:
    class Echo(Recorder):
        def show_again(self, snapshot: Snapshot) -> bool:
            return True

    with running(Scheduler(), Echo()) as run:
        run._ipython_display_()
    with pytest.raises(NotImplementedError):
        run._ipython_display_()
    with running(Scheduler()) as run, pytest.raises(NotImplementedError):
        run._ipython_display_()


def test_a_view_that_fails_ends_no_run() -> None:
    class Broken(Recorder):
        def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
            super().show(snapshot, awaited)
            raise OSError("the display is gone")

    view = Broken()
    with running(Scheduler(), view):
        watch.until(lambda: len(view.shown) > 2)


def test_a_view_that_hangs_holds_up_no_run() -> None:
    class Stuck(Recorder):
        hanging = threading.Event()

        def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
            super().show(snapshot, awaited)
            if len(self.shown) > 1:  # the first is in the thread that submits
                self.hanging.wait(watch.DEADLINE)
            return Shown()

    view = Stuck()
    with running(Scheduler(), view):
        watch.until(lambda: len(view.shown) > 1)
    view.hanging.set()
