"""What ranks report reaches the driver, whatever happens between them."""

from __future__ import annotations

import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trainings
import watch
from sessions import Make

from distributor import ConfigurationError, Run, Status, TorchDistributor, TrainingError
from distributor.channel.server import ChannelServer
from distributor.run import callback_thread as calling

spread = {"max_processes_per_node": 1}


def report_steps(steps: int, go: str = "", end: str = "") -> None:
    """Reports, then waits, reports once more, and ends in its way."""
    import os
    import signal

    from distributor import runtime

    for step in range(1, steps + 1):
        runtime.report(step=step, total_steps=2 * steps, loss=1.0 / step)
    if go:
        trainings.wait_for(go)
    runtime.report({"val/loss": 0.25}, step=steps + 1)
    if end == "raise":
        raise ValueError("boom")
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def of(run: Run, rank: int) -> list[tuple[int | None, dict[str, float]]]:
    return [(row.step, dict(row.values)) for row in run.metrics if row.rank == rank]


def whole(steps: int) -> list[tuple[int | None, dict[str, float]]]:
    return [*((step, {"loss": 1.0 / step}) for step in range(1, steps + 1)), (steps + 1, {"val/loss": 0.25})]


def test_reports_arrive_while_the_run_goes(make: Make, tmp_path: Path) -> None:
    run = make(2).submit(report_steps, 100, str(tmp_path / "go"))
    watch.until(lambda: len(run.metrics) == 200)
    progress = run.progress
    assert progress is not None and (progress.step, progress.total) == (100, 200)
    assert progress.seconds_left is not None
    assert run.latest_metrics == {"loss": 0.01}
    assert "running, step 100 of 200, " in repr(run)
    assert "step 100 of 200" in run._repr_html_()
    (tmp_path / "go").touch()
    run.result(watch.DEADLINE)
    assert of(run, 0) == of(run, 1) == whole(100)
    assert run.metrics.dropped == 0
    assert all(row.attempt == 0 for row in run.metrics)


@pytest.mark.parametrize("end", ["raise", "kill"])
def test_a_failed_run_has_all_reports(make: Make, end: str) -> None:
    run = make(1).submit(report_steps, 1000, end=end)
    with pytest.raises(TrainingError):
        run.result(watch.DEADLINE)
    assert of(run, 0) == whole(1000)


def refuse(self: ChannelServer, *_: object) -> None:
    raise OSError("no port is free")


@pytest.mark.spark
@pytest.mark.parametrize("end", ["", "raise"])
@pytest.mark.slow
def test_without_a_channel_reports_come_at_the_end(
    two_executors: Any, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChannelServer, "listen", refuse)
    run = TorchDistributor(2, False, False, **spread).submit(report_steps, 3000, end=end)
    run.wait(watch.DEADLINE)
    assert (run.status is Status.FAILED) == bool(end)
    assert of(run, 0) == of(run, 1) == whole(3000)


class Listener:
    """Takes notes of what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[int | None] = []
        self.results: list[Any] = []
        self.thread: threading.Thread | None = None

    def on_start(self, run: Run) -> None:
        self.calls.append("start")
        self.thread = threading.current_thread()

    def on_metrics(self, run: Run, rows: Any) -> None:
        assert threading.current_thread() is self.thread
        self.calls += ["metrics"] * (self.calls[-1] != "metrics")
        self.steps += [row.step for row in rows]

    def on_end(self, run: Run) -> None:
        self.calls.append(run.status.value)
        self.results = run.results(0)


def test_callbacks_are_called_in_order(make: Make) -> None:
    first, second = Listener(), Listener()
    make(1, callbacks=[first, second]).run(report_steps, 300)
    for listener in (first, second):
        assert listener.calls == ["start", "metrics", "succeeded"]
        assert listener.steps == list(range(1, 302))
        assert listener.results == [None]


class Broken:
    def on_metrics(self, run: Run, rows: Any) -> None:
        raise KeyError("loss")

    def on_start(self, run: Run) -> None:
        raise RuntimeError("no network")

    def on_end(self, run: Run) -> None:
        raise RuntimeError("still no network")


@pytest.mark.slow
def test_an_error_in_a_callback_is_a_warning(make_local: Make, caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    with pytest.raises(TrainingError, match="boom"):
        make_local(1, callbacks=[Broken(), listener]).run(report_steps, 3, end="raise")
    place = f"{__file__}:{Broken.on_start.__code__.co_firstlineno + 1}"
    assert f"Broken.on_start raised RuntimeError: no network ({place}); this warning is shown once" in caplog.text
    assert "Broken.on_end raised RuntimeError: still no network" in caplog.text
    assert listener.calls == ["start", "metrics", "failed"]


class Leaving:
    """Ends the thread that calls it, or tries to."""

    def on_start(self, run: Run) -> None:
        sys.exit("no network")


def test_a_callback_that_exits_ends_no_other(make_local: Make, caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    make_local(1, callbacks=[Leaving(), listener]).run(report_steps, 3)
    assert listener.calls == ["start", "metrics", "succeeded"]
    assert "Leaving.on_start raised SystemExit: no network" in caplog.text


class Hanging:
    def __init__(self) -> None:
        self.released = threading.Event()

    def on_end(self, run: Run) -> None:
        self.released.wait()


def test_an_error_of_a_callback_is_warned_of_once(
    make_local: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calling, "_INTERVAL", 0.01)
    run = make_local(1, callbacks=[Broken(), listener := Listener()]).submit(report_steps, 5, str(tmp_path / "go"))
    watch.until(lambda: listener.steps)
    (tmp_path / "go").touch()
    run.result(watch.DEADLINE)
    assert listener.steps == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("Broken.on_metrics raised KeyError: 'loss'") == 1


class Attempts:
    """Takes notes of attempts."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_attempt_end(self, run: Run, attempt: Any) -> None:
        self.calls.append(attempt)

    def on_end(self, run: Run) -> None:
        self.calls.append("end")


def fail_in_the_first_attempt() -> int:
    from distributor import runtime

    if runtime.attempt() == 0:
        raise ValueError("not this time")
    return runtime.attempt()


def test_on_attempt_end_is_called_for_each_attempt(make: Make) -> None:
    callback = Attempts()
    run = make(1, max_restarts=1, restart_on="any", callbacks=[callback]).submit(fail_in_the_first_attempt)
    assert run.result(watch.DEADLINE) == 1
    assert callback.calls == [*run.attempts, "end"]
    assert [(attempt.number, attempt.reason) for attempt in run.attempts] == [
        (0, "rank 0 failed: ValueError: not this time"),
        (1, None),
    ]


def test_a_callback_that_hangs_holds_nobody_up_forever(
    make_local: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calling, "PATIENCE", 0.1)
    hanging = Hanging()
    assert make_local(1, callbacks=[hanging]).run(trainings.rank) == 0
    assert "a callback is still running 0.1 s after its end; it is left running" in caplog.text
    hanging.released.set()


@pytest.mark.parametrize(
    ("callbacks", "why"),
    [
        ("print", "callbacks must be a list of objects with methods such as on_metrics, not 'print'"),
        (3, "callbacks must be a list of objects with methods such as on_metrics, not 3"),
        (
            [Listener],
            "Listener'> is not an object with any of the methods on_start, on_metrics, on_checkpoint, on_attempt_end, ",
        ),
        ([print], "is not an object with any of the methods on_start"),
    ],
)
def test_refuses_objects_without_callback_methods(make_local: Make, callbacks: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        make_local(1, callbacks=callbacks)


def report_much() -> int:
    from distributor import runtime

    for step in range(200_001):
        runtime.report(step=step, loss=0.5, accuracy=0.25)
    return step


@pytest.mark.long
def test_reports_beyond_the_limit_are_thinned_out(make_local: Make, caplog: pytest.LogCaptureFixture) -> None:
    run = make_local(1).submit(report_much)
    assert run.result(watch.DEADLINE) == 200_000
    metrics = run.metrics
    assert metrics.dropped + len(metrics) == 200_001
    distances = {after.step - before.step for before, after in pairwise(metrics[:-1])}  # type: ignore[operator]
    assert len(distances) == 1
    assert caplog.text.count("rank 0 has reported more than 8.0 MiB") == 1
    assert run.progress is not None and run.progress.step == 200_000


def test_a_run_without_reports_has_no_metrics(make_local: Make) -> None:
    run = make_local(1).submit(trainings.rank)
    assert run.result() == 0
    assert len(run.metrics) == 0
    assert run.latest_metrics == {}
    assert run.progress is None
    assert run.plot() is not None


class Order:
    """Takes notes of the last calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def on_end(self, run: Run) -> None:
        self.calls.append("end")

    def on_close(self, run: Run) -> None:
        self.calls.append("close")


def test_on_close_follows_the_end_of_all_callbacks(make_local: Make) -> None:
    calls: list[str] = []
    make_local(1, callbacks=[Order(calls), Order(calls)]).run(trainings.rank)
    assert calls == ["end", "end", "close", "close"]


def test_a_run_knows_its_arguments_and_versions(make_local: Make) -> None:
    run = make_local(1).submit(report_steps, 3, end="")
    assert run.arguments == {"steps": 3, "go": "", "end": ""}
    assert run.trial is None
    assert {"Python", "torch", "distributor"} <= run.versions.keys()
    run.result(watch.DEADLINE)
