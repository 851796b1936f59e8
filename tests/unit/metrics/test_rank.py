"""A rank's side of reports: what it accepts, and what it writes."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from distributor import ConfigurationError, runtime
from distributor.metrics import rank as reports
from distributor.metrics.driver import Reports
from distributor.values.outcome import REPORTS, Log
from distributor.values.reports import LONGEST, Report, pack, parse


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a rank, which this process is."""
    monkeypatch.setattr(reports, "_writer", None)
    reports.begin(tmp_path / "reports", 4, 3)
    yield tmp_path / "reports"
    if reports._writer is not None:
        os.close(reports._writer._file._descriptor)


def lines(file: Path) -> list[Report]:
    return [report for line in file.read_bytes().splitlines() if (report := parse(line)) is not None]


def test_a_rank_says_once_where_it_begins_and_another_runs_weights_are_no_beginning(file: Path) -> None:
    """They are first loaded in many trainings, which then continue from their own checkpoint if there is one."""
    for step, own in ((9, False), (8, False), (2, True), (3, True), (7, False)):
        reports.resumed(step, "/runs", own=own)
    assert [parse(line).step for line in file.read_bytes().splitlines()] == [9, 2]  # type: ignore[union-attr]


def test_a_report_is_a_line(file: Path) -> None:
    runtime.report({"val/loss": torch.tensor(0.5)}, step=torch.tensor(7), total_steps=10, lr=Fraction(1, 4), ok=True)
    runtime.report(loss=float("nan"), large=1 << 70)
    first, second = lines(file)
    assert (first.number, first.attempt, first.step, first.total_steps) == (0, 3, 7, 10)
    assert first.values == {"val/loss": 0.5, "lr": 0.25, "ok": 1}
    assert second.values["large"] == float(1 << 70)
    assert second.step is None and second.values["loss"] != second.values["loss"]


class EagerTensor:
    """As TensorFlow's: it has no ``item()``, and is no ``numbers.Real``."""

    shape = ()

    def __float__(self) -> float:
        return 7.0


def test_a_number_need_not_be_pythons(file: Path) -> None:
    runtime.report(loss=EagerTensor(), lr=Decimal("0.5"), step=EagerTensor())  # type: ignore[arg-type]
    assert [(report.step, report.values) for report in lines(file)] == [(7, {"loss": 7.0, "lr": 0.5})]


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"loss": "low"}, "loss must be a number or a tensor of one element, not 'low'"),
        ({"loss": None}, "loss must be a number or a tensor of one element, not None"),
        ({"loss": [1.0]}, r"loss must be a number or a tensor of one element, not \[1.0\]"),
        ({"loss": torch.zeros(2, 3)}, r"loss must be .*, not Tensor of shape \(2, 3\)"),
        ({"loss": 10**400}, "loss must be a number or a tensor of one element, not 1000"),
        (0.5, r"values need names, as in report\(loss=0.5\) or report\({'val/loss': 0.5}\), not 0.5"),
        ({1: 2.0}, "names of values must be strings, not 1"),
        ({f"{number}": 0.25 for number in range(LONGEST // 8)}, "report.. was given .* KiB, but takes at most 64 KiB"),
    ],
)
def test_what_is_no_report_is_an_error(file: Path, report: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        runtime.report(report)
    assert lines(file) == []


@pytest.mark.parametrize("name", ["step", "total_steps"])
def test_steps_are_whole_numbers(file: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"report\(\): {name} must be a whole number, not 0.5"):
        runtime.report(**{name: 0.5}, loss=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [float("nan"), float("inf")])
def test_a_step_without_end_is_an_error(file: Path, step: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"report\(\): step must be a whole number, not {step}"):
        runtime.report(step=step)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1 << 63, 1e300])
def test_a_step_that_the_driver_would_refuse_is_an_error(file: Path, step: float) -> None:
    with pytest.raises(ConfigurationError, match=r"report\(\): step must be less than 2\*\*63, not"):
        runtime.report(step=step, loss=1.0)  # type: ignore[arg-type]
    runtime.report(step=(1 << 63) - 1, loss=2.0)
    assert [report.step for report in lines(file)] == [(1 << 63) - 1]


def test_names_without_end_keep_no_latest_value_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints have the latest values, and the best of them is chosen by these."""
    monkeypatch.setattr(reports, "_latest", {})
    for step in range(2000):
        runtime.report({f"norm/{step}": 1.0, "loss": float(step)})
    assert reports.latest()["loss"] == 1999.0
    assert len(reports.latest()) <= 1001


def test_a_signal_handler_may_report_while_it_interrupts_a_report(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = threading.Event()

    def interrupt(report: Report) -> bytes:
        if not interrupted.is_set():
            interrupted.set()
            runtime.report(loss=2.0)
        return pack(report)

    monkeypatch.setattr(reports, "pack", interrupt)
    thread = threading.Thread(target=runtime.report, kwargs={"loss": 1.0}, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert sorted((report.number, report.values["loss"]) for report in lines(file)) == [(0, 1.0), (1, 2.0)]


def test_outside_a_run_a_report_is_checked_and_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_writer", None)
    runtime.report(step=1, loss=0.5)
    with pytest.raises(ConfigurationError, match="must be a number"):
        runtime.report(loss="low")


def test_a_process_that_the_rank_has_forked_reports_nothing(file: Path) -> None:
    pid = os.fork()
    if pid == 0:
        runtime.report(loss=1.0)
        reports.finish()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    runtime.report(loss=2.0)
    assert [report.values["loss"] for report in lines(file)] == [2.0]


def test_a_fork_ends_even_if_another_thread_was_reporting(file: Path) -> None:
    assert reports._writer is not None
    lock, held, end = reports._writer._lock, threading.Event(), threading.Event()

    def report() -> None:
        with lock:
            held.set()
            end.wait()

    thread = threading.Thread(target=report)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        reports.finish()
        os._exit(0)
    end.set()
    assert os.waitpid(pid, 0)[1] == 0
    thread.join()


def test_too_many_reports_are_thinned_out_evenly(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = reports.Writer(file, 10_000, 0)
    monkeypatch.setattr(reports, "_writer", writer)
    for step in range(3001):
        runtime.report(step=step, loss=1.0)
    runtime.report(step=3001, loss=0.0)
    reports.finish()
    found = lines(file)
    assert found[-1].values == {"loss": 0.0}
    last = max(report.stage for report in found)
    assert last >= 4
    kept = [report.number for report in found[:-1] if report.number % 2**last == 0]
    assert kept == list(range(0, 3001, 2**last))
    assert all(report.number % 2**report.stage == 0 for report in found[:-1])
    assert len(kept) * len(file.read_bytes()) / len(found) <= 10_000


def test_a_descriptor_that_is_another_files_by_now_is_left_alone(file: Path, tmp_path: Path) -> None:
    """As after ``os.closerange``."""
    runtime.report(loss=1.0)
    assert reports._writer is not None
    number = reports._writer._file._descriptor
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    os.dup2(other, number)
    runtime.report(loss=2.0)
    os.close(reports._writer._file._descriptor)
    runtime.report(loss=3.0)
    assert [report.values["loss"] for report in lines(file)] == [1.0, 2.0, 3.0]
    assert (tmp_path / "other").read_bytes() == b""
    os.close(number)
    os.close(other)


def test_a_full_disk_costs_reports_and_nothing_else(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, ends = os.write, iter([5, None, None])

    def full(descriptor: int, data: bytes) -> int:
        if (most := next(ends, len(data))) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:most])

    monkeypatch.setattr("distributor.metrics.rank.os.write", full)
    for number in range(5):
        runtime.report(loss=number)
    assert [report.values["loss"] for report in lines(file)] == [3, 4]


def test_the_last_value_of_each_metric_arrives_however_many_reports_follow(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = reports.Writer(file, 10_000, 0)
    monkeypatch.setattr(reports, "_writer", writer)
    for epoch in range(5):
        for step in range(1001):  # so that values of an epoch have odd and even numbers
            runtime.report(step=1001 * epoch + step, loss=1.0, lr=0.5)
        runtime.report({"val/loss": 10.0 - epoch}, step=step, epoch=epoch)
    runtime.report(loss=0.0, step=(step := 6000))
    while writer._left_out.get("") is not None:
        runtime.report(loss=0.25, step=(step := step + 1))
    reports.finish()
    driver = Reports(1, 1)
    driver.fit(1)
    monkeypatch.setattr(driver, "_room", 10_000)
    driver.take(Log(0, REPORTS, 0, file.read_bytes()))
    assert driver.latest == {"loss": 0.25, "lr": 0.5, "val/loss": 6.0, "epoch": 4.0}
    assert driver.progress is not None
    assert driver.progress.step == step
