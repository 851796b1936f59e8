"""The folder that remembers runs: bounded, whole, and shared by several drivers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from distributor.metrics.ended import EndedAttempt
from distributor.tracking import history
from distributor.tracking.history import History, Runs, default_folder
from distributor.tracking.record import LONGEST, MOST_ATTEMPTS, MOST_NAMES, Driver, RunRecord

RECORD = RunRecord("a", None, "train", Driver.here(), "running", 1.0)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"DISTRIBUTOR_RUNS": "/runs", "XDG_CACHE_HOME": "/caches"}, "/runs"),
        ({"DISTRIBUTOR_RUNS": "", "XDG_CACHE_HOME": "/caches"}, "/caches/distributor/runs"),
        ({"DISTRIBUTOR_RUNS": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/distributor/runs"),
    ],
)
def test_where_runs_are_remembered(variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(default_folder()) == folder


def test_the_newest_come_first_and_what_is_no_record_is_left_out(tmp_path: Path) -> None:
    kept = History(tmp_path)
    assert kept.read() == []
    kept.write(RECORD)
    kept.write(replace(RECORD, id="b", submitted=2.0))
    (tmp_path / "half.json").write_text('{"id": "c"')
    (tmp_path / "other.json").write_text('{"id": "c"}')
    (tmp_path / "large.json").write_bytes(b" " * (1 << 20))
    kept.write(replace(RECORD, id="never", submitted=1e20))
    kept.write(replace(RECORD, id="nobody", driver=replace(RECORD.driver, pid=1 << 70)))
    os.mkfifo(tmp_path / "pipe.json")
    assert [record.id for record in kept.read()] == ["b", "a"]


def test_long_texts_of_any_alphabet_are_read(tmp_path: Path) -> None:
    text = "\N{GRINNING FACE}" * LONGEST
    record = replace(
        RECORD,
        arguments={f"{number}{text}": text for number in range(MOST_NAMES)},
        latest_metrics={f"{number}{text}": 1.0 for number in range(MOST_NAMES)},
        attempts=(EndedAttempt(0, 1.0, text),) * MOST_ATTEMPTS,
    )
    History(tmp_path).write(record)
    assert History(tmp_path).read() == [record]


def test_a_slice_is_a_table_too() -> None:
    some = Runs(replace(RECORD, id=id) for id in "abc")[1:]
    assert [run.id for run in some] == ["b", "c"] and some.active == []
    assert "train" in repr(some) and "<pre>" in some._repr_html_()


def test_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST", 3)
    kept = History(tmp_path)
    for number in range(5):
        kept.write(replace(RECORD, id=str(number), submitted=float(number)))
        os.utime(tmp_path / f"{number}.json", (number, number))
    for name, age in ((".5-left.new", 1.0), (".6-now.new", None)):
        (tmp_path / name).touch()
        if age is not None:
            os.utime(tmp_path / name, (age, age))
    (tmp_path / "study").mkdir()
    kept.prune()
    assert sorted(os.listdir(tmp_path)) == [".6-now.new", "2.json", "3.json", "4.json", "study"]


def test_several_drivers_write_at_once(tmp_path: Path) -> None:
    def drive(name: str) -> None:
        for step in range(50):
            History(tmp_path).write(replace(RECORD, id=name, step=step))
            History(tmp_path).prune()
            assert History(tmp_path).read()

    threads = [threading.Thread(target=drive, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((record.id, record.step) for record in History(tmp_path).read()) == [(str(n), 49) for n in range(4)]


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from distributor.tracking.history import History
from distributor.tracking.record import Driver, RunRecord

record, step = RunRecord("a", None, "train", Driver.here(), "running", 1.0, arguments={"text": "x" * 500}), 0
while True:
    History(Path(sys.argv[1])).write(replace(record, step=step))
    step += 1
    if step == 20:
        print("go", flush=True)
"""


def test_a_driver_that_is_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"go\n"
            process.send_signal(signal.SIGKILL)
        (record,) = History(tmp_path).read()
        assert record.status == "lost"
        assert record.step is not None and record.step >= 18


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(OSError):
        History(tmp_path).write(RECORD)
    assert os.listdir(tmp_path) == ["a.json"]
