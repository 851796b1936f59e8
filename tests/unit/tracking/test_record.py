"""What is remembered of a run, as text."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from distributor.metrics.ended import EndedAttempt
from distributor.metrics.goodput import Goodput
from distributor.tracking.record import Driver, RunRecord, record_of, show
from distributor.values import codec

RECORD = RunRecord(
    "3f2a",
    "digits",
    "train",
    Driver.here(),
    "running",
    1000.0,
    num_processes=4,
    step=8,
    total_steps=40,
    latest_metrics={"loss": 0.25, "bad": "nan"},
    arguments={"epochs": 3, "fast": True, "lr": 0.1, "data": None},
    attempts=(EndedAttempt(0, 12.0, "rank 1 failed", 8, Goodput(training=8.0, starting=4.0)),),
    goodput=Goodput(training=8.0, starting=4.0),
)


def ended_process() -> Driver:
    """A process of this machine that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return replace(Driver.here(), pid=process.pid, started="1")


def test_a_record_is_the_same_after_its_way_through_a_file() -> None:
    assert codec.read(RunRecord, codec.pack(RECORD)) == RECORD


def test_no_password_is_kept_and_any_name_can_be_printed() -> None:
    why = "checkpoints 'sftp://me:hush@host/kept' cannot be used"
    run = Mock(
        id="a",
        error=OSError(why),
        attempts=(EndedAttempt(0, 1.0, why),),
        last_checkpoint=SimpleNamespace(path="sftp://me:hush@host/kept/step-8"),
        snapshot=lambda: SimpleNamespace(title=os.fsdecode(b"tr\xff.py")),
        latest_metrics={},
        arguments={},
        goodput=Goodput(),
    )
    record = record_of(run, Driver.here())
    assert "hush" not in str(record.error) + str(record.attempts) + str(record.checkpoint)
    assert record.checkpoint == "sftp://me@host/kept/step-8"
    assert record.title == r"tr\udcff.py"


def test_a_run_whose_driver_is_gone_is_lost() -> None:
    assert RECORD.status == "running"
    lost = replace(RECORD, driver=ended_process())
    assert lost.status == "lost"
    assert lost.seconds == 12.0
    assert replace(lost, said="failed", ended=1010.0).status == "failed"


@pytest.mark.parametrize(
    ("changed", "gone"),
    [
        ({"scope": "another boot"}, True),
        ({"host": "another", "scope": "another boot"}, False),
        ({"scope": ""}, False),
        ({"started": "1"}, True),
        ({"pid": 1}, True),
        ({}, False),
    ],
)
def test_only_its_own_host_knows_that_a_driver_is_gone(changed: dict[str, str], gone: bool) -> None:
    assert replace(Driver.here(), **changed).is_gone() is gone


def test_a_record_tells_all_in_lines() -> None:
    text = str(replace(RECORD, ended=1012.0, said="failed", error="boom", trial=3, study="search"))
    for line in (
        "run digits (3f2a): failed",
        "  trial: 3 of search",
        "  arguments: epochs 3, fast True, lr 0.1, data None",
        "  metrics: loss 0.25, bad nan",
        "  step: 8 of 40",
        "  time: 67 % of 12 s in training; starting 4.0 s",
        "  attempt 0, 12.0 s, last step 8: rank 1 failed",
        "  error: boom",
    ):
        assert line in text.splitlines()
    assert "train with 4 processes, " in text and f"from process {os.getpid()} on " in text


def test_a_run_is_called_by_its_name_its_trial_or_its_function() -> None:
    assert RECORD.label == "digits"
    assert replace(RECORD, name=None, trial=3, study="search").label == "search/3"
    assert replace(RECORD, name=None).label == "train"


def test_runs_are_a_table() -> None:
    head, line = show([replace(RECORD, ended=1012.0, said="succeeded")]).splitlines()
    assert head.split() == ["name", "id", "status", "when", "time", "step", "metrics"]
    assert line.startswith("digits  3f2a  succeeded  ")
    assert line.endswith("12 s  8 of 40  loss 0.25, bad nan")
