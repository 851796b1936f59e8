"""Runs are remembered, and their reports reach trackers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trainings
import watch
from sessions import Make

from distributor import ConfigurationError, TrainingError, runs, sweep
from distributor.callbacks import TensorBoard
from distributor.cli import command
from distributor.metrics.table import Row
from distributor.tracking import history, tensorboard
from distributor.tracking.record import RunRecord


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs are remembered."""
    monkeypatch.setenv("DISTRIBUTOR_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def remembered() -> list[RunRecord]:
    """Without runs of other tests in this process, which may still be ending."""
    return [run for run in runs() if isinstance(run, RunRecord)]


def report(steps: int, go: str = "", token: str = "", end: str = "") -> None:
    from distributor import runtime

    for step in range(1, steps + 1):
        runtime.report(step=step, total_steps=steps, loss=1.0 / step, rate=float("nan"))
    if go:
        trainings.wait_for(go)
    if end and runtime.attempt() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_runs_are_remembered(make: Make, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(2, name="digits", max_restarts=1).submit(report, 4, str(tmp_path / "go"), "hush", end="kill")
    watch.until(lambda: re.search(rf"digits  {run.id}  +running .* 4 of 4 +loss 0.25, rate nan", repr(runs())))
    assert runs().active == [run] and list(runs()) == [run]
    (tmp_path / "go").touch()
    run.result(watch.DEADLINE)
    with pytest.raises(TrainingError):
        make(1).run(divmod, 1, 0)
    failed, record = runs()
    assert runs().active == []
    assert (failed.status, failed.name) == ("failed", None)
    assert "ZeroDivisionError" in failed.error
    assert (record.id, record.name, record.status, record.num_processes) == (run.id, "digits", "succeeded", 2)
    assert (record.step, record.total_steps, record.latest_metrics) == (4, 4, {"loss": 0.25, "rate": "nan"})
    assert dict(record.arguments) == {"steps": 4, "go": str(tmp_path / "go"), "end": "kill"}
    assert [attempt.reason for attempt in record.attempts] == [attempt.reason for attempt in run.attempts]
    assert record.goodput == run.goodput and record.placement == str(run.placement)
    assert not any(b"hush" in path.read_bytes() for path in folder.iterdir())
    assert command.call(["runs"]) == 0
    assert re.search(rf"digits +{run.id} +succeeded", capsys.readouterr().out)
    for wanted in ("digits", run.id):
        assert command.call(["runs", wanted]) == 0
        out = capsys.readouterr().out
        assert "killed by SIGKILL" in out and "% of " in out and "steps 4" in out
    assert command.call(["runs", "divmod"]) == 0  # without a name, the list calls it so
    assert f"run {failed.id}: failed" in capsys.readouterr().out
    assert command.call(["runs", "other"]) == 2
    assert f"no run 'other' is remembered in {folder}: distributor runs lists them" in capsys.readouterr().err


def save(folder: str) -> None:
    """Save a step, and report nothing."""
    from distributor import runtime

    runtime.save_checkpoint({"step": 1}, step=1, wait=True)
    trainings.wait_for(folder)


@pytest.mark.slow
def test_a_run_that_only_saves_is_remembered_with_it(make_local: Make, folder: Path, tmp_path: Path) -> None:
    run = make_local(1, checkpoints=tmp_path / "kept").submit(save, str(tmp_path / "go"))
    watch.until(lambda: any(record.checkpoint for record in history.History(folder).read()))
    (tmp_path / "go").touch()
    run.result(watch.DEADLINE)
    assert run.last_checkpoint is not None
    assert [record.checkpoint for record in remembered()] == [run.last_checkpoint.path]


def test_there_may_be_no_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.call(["runs"]) == 0
    assert capsys.readouterr().out == f"no runs are remembered in {folder}\n"
    watch.until(lambda: len(runs()) == 0)  # runs of other tests in this process may still be ending


DRIVER = """
import sys
sys.path[:0] = sys.argv[2:]
from test_tracking import report
from distributor import TorchDistributor

TorchDistributor(1, True, False, name="killed").run(report, 3, sys.argv[1])
"""


def start_driver(code: str, *arguments: Any) -> subprocess.Popen[bytes]:
    path = [str(Path(__file__).parent), str(Path(__file__).parent / "support")]
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments), *path], stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_run_whose_driver_was_killed_is_lost(folder: Path, tmp_path: Path) -> None:
    driver = start_driver(DRIVER, tmp_path / "go")
    watch.until(lambda: any(run.step == 3 for run in remembered()))
    assert [(run.name, run.status) for run in remembered()] == [("killed", "running")]
    driver.kill()
    driver.wait()
    assert [(run.name, run.status) for run in remembered()] == [("killed", "lost")]
    (tmp_path / "go").touch()


def test_a_folder_that_cannot_be_written_costs_one_warning(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISTRIBUTOR_RUNS", str(tmp_path / "file" / "runs"))
    monkeypatch.setattr(history, "_warned", set())
    for _ in range(2):
        assert make_local(1).run(trainings.rank) == 0
    assert caplog.text.count("runs are not remembered, since") == 1
    assert f"{tmp_path}/file/runs cannot be written: Not a directory (DISTRIBUTOR_RUNS names another" in caplog.text


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def report_in_two_attempts(first: int, last: int, base: float) -> None:
    """The second attempt repeats the first one's last step. Rank 1 is of no account, but for what it alone reports."""
    from distributor import runtime

    rank, attempt = int(os.environ["RANK"]), runtime.attempt()
    begin = first + 2 * attempt
    for step in range(begin, begin + 3 if attempt == 0 else last + 1):
        runtime.report({"loss": base + attempt + 100 * rank, **({"other": 1.0} if rank else {})}, step=step)
    if attempt == 0 and last > begin + 3 and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long_on_executors
def test_tensorboard_reads_one_line_across_restarts_and_resumes(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = TensorBoard(tmp_path / "logs")
    options: Any = {"name": "../digits", "checkpoints": tmp_path / "kept", "max_restarts": 1, "callbacks": [board]}
    make(2, **options).run(report_in_two_attempts, 1, 5, 0.0)
    folder = tmp_path / "logs" / "%2E.%2Fdigits"
    assert scalars(folder, "loss") == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert scalars(folder, "other")[-1] == (5, 1.0)
    make(2, **options).run(report_in_two_attempts, 5, 7, 10.0)
    assert scalars(folder, "loss") == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 10.0), (6, 10.0), (7, 10.0)]


def report_before_the_loop(first: int, last: int) -> None:
    from distributor import runtime

    runtime.report(parameters=float(first))
    for step in range(first, last):
        runtime.report(step=step, loss=float(step))


@pytest.mark.slow
def test_a_report_without_a_step_replaces_nothing(make_local: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options: Any = {"name": "digits", "checkpoints": tmp_path / "kept", "callbacks": [TensorBoard(tmp_path / "logs")]}
    make_local(1, **options).run(report_before_the_loop, 1, 4)
    make_local(1, **options).run(report_before_the_loop, 3, 6)
    folder = tmp_path / "logs" / "digits"
    assert scalars(folder, "loss") == [(step, float(step)) for step in range(1, 6)]
    make_local(1, **options).run(report_before_the_loop, 6, 6)  # it reports no step at all
    assert scalars(folder, "loss") == [(step, float(step)) for step in range(1, 6)]
    assert [value for _, value in scalars(folder, "parameters")] == [1.0, 3.0, 6.0]
    writer = tensorboard._Writer(str(folder), {})
    for time in range(30):  # none of them has a step
        writer.write([Row(0, None, float(time), 0, {"parameters": 7.0 + time})])
    assert len(writer.held) == 0 and [value for _, value in scalars(folder, "parameters")][-1] == 36.0
    writer.close()


def test_tensorboard_has_a_folder_for_each_trial(make_local: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    distributor = make_local(1, callbacks=[TensorBoard(tmp_path)])
    sweep(distributor, report, {"steps": [2, 3]}, metric=("loss", "min"), trials=2, name="search", at_once=2)
    for number in range(2):
        assert scalars(tmp_path / "search" / str(number), "loss")[:2] == [(1, 1.0), (2, 0.5)]


def test_tensorboard_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.tracking.tensorboard.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'distributor\[tensorboard\]'"):
        TensorBoard("logs")


def test_a_url_is_no_folder_for_tensorboard() -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(ConfigurationError, match="log_dir must be a folder on the driver, not the URL 's3://bucket/a'"):
        TensorBoard("s3://bucket/a")
