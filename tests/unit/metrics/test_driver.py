"""What the driver makes of reports as they arrive, without processes."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

from distributor.errors import ConfigurationError
from distributor.metrics import driver
from distributor.metrics.driver import Reports
from distributor.metrics.table import Metrics, Row, TrackedRow
from distributor.values import reports as form
from distributor.values.outcome import REPORTS, Log
from distributor.values.reports import Committed, Progress, Report, Resumed, TrackedReport, Unsaved, Warned, pack


def made(number: int, stage: int = 0, attempt: int = 0, **values: float) -> bytes:
    return pack(Report(number, stage, attempt, 100.0 + number, number, None, values))


def taken(*pieces: Log, world_size: int = 2, attempts: int = 1) -> Reports:
    reports = Reports(world_size, attempts)
    for piece in pieces:
        reports.take(piece)
    return reports


def test_callbacks_learn_which_rows_a_rank_has_logged_itself() -> None:
    reports = Reports(1, 1)
    reports.new()
    own = pack(TrackedReport(0, 0, 0, 100.0, 1, None, {"loss": 1.0}))
    reports.take(Log(0, REPORTS, 0, own + made(1, loss=0.5)))
    assert [type(row) for row in reports.new()] == [TrackedRow, Row]
    assert [(type(row), row.values) for row in reports.metrics] == [(Row, {"loss": 1.0}), (Row, {"loss": 0.5})]


def test_a_report_that_comes_late_takes_back_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank writes at its end what it has left out before."""
    monkeypatch.setattr(driver, "_RECENT", 1)
    progress = taken(Log(0, REPORTS, 0, made(8, loss=1.0) + made(3, loss=2.0))).progress
    assert progress is not None
    assert progress.step == 8


def test_each_byte_counts_once_however_it_comes() -> None:
    data = made(0, loss=1.0) + made(1, loss=0.5) + made(2, loss=math.inf)
    reports = Reports(2, 1)
    assert reports.new() == ()
    for start, end in ((0, 7), (0, 40), (7, 45), (30, len(data)), (0, len(data))):
        reports.take(Log(1, REPORTS, start, data[start:end]))
    assert [(row.rank, row.step, row.values) for row in reports.metrics] == [
        (1, 0, {"loss": 1.0}),
        (1, 1, {"loss": 0.5}),
        (1, 2, {"loss": math.inf}),
    ]
    assert [len(reports.new()), len(reports.new())] == [3, 0]
    assert reports.received(1) == len(data)
    assert reports.offsets([0, 1]) == ((1, REPORTS, len(data)),)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[1]",
        b"[0,0,0,1.0,null,null,{",
        b'[0,0,0,1.0,null,null,{"loss":"low"}]',
        b'[0,0,0,1.0,null,null,{"loss":[1]}]',
        b'[-1,0,0,1.0,null,null,{"loss":1}]',
        b'[0,0,0,1.0,0.5,null,{"loss":1}]',
        b'[0,true,0,1.0,0,null,{"loss":1}]',
        b'[0,0,9,1.0,0,null,{"loss":1}]',  # no such attempt
        b"[" * 100_000,
        b"\xff\xfe",
        made(1 << 70, loss=1.0).strip(),
        made(1, stage=63, loss=1.0).strip(),
        made(1, loss=1 << 63).strip(),
        b'[0,0,0,1.0,0,null,{"loss":' + b"9" * 5000 + b"}]",
    ],
)
def test_what_is_no_report_is_left_out(line: bytes) -> None:
    data = line + b"\n" + made(0, loss=1.0)
    assert [row.values for row in taken(Log(0, REPORTS, 0, data)).metrics] == [{"loss": 1.0}]


def test_a_line_without_end_takes_bounded_memory() -> None:
    reports, offset = Reports(1, 1), 0
    for _ in range(20):
        reports.take(Log(0, REPORTS, offset, b"x" * form.LONGEST))
        offset += form.LONGEST
    assert len(reports._streams[0].begun) <= form.LONGEST + 1
    reports.take(Log(0, REPORTS, offset, b"\n" + made(0, loss=1.0)))
    assert len(reports.metrics) == 1


def test_a_later_stage_thins_out_what_is_there() -> None:
    reports, data = Reports(1, 1), b"".join(made(number) for number in range(8))
    assert reports.take(Log(0, REPORTS, 0, data)) == []
    later = b"".join(made(number, stage=2) for number in (8, 12))
    (warning,) = reports.take(Log(0, REPORTS, len(data), later))
    assert warning.startswith("rank 0 has reported more than 8.0 MiB: ")
    assert [row.step for row in reports.metrics] == [0, 4, 8, 12]
    assert reports.metrics.dropped == 9
    last = made(15, stage=2)  # the last one of a rank, which no other follows
    assert reports.take(Log(0, REPORTS, len(data + later), last)) == []
    assert [row.step for row in reports.metrics] == [0, 4, 8, 12, 15]


def test_a_warning_of_ranks_is_shown_once_in_each_attempt() -> None:
    reports = Reports(2, 2)
    lines = [pack(Warned(attempt, text)) for attempt in (0, 1, 2) for text in ("a \x1b[31mred", "b")]
    data = b"".join(lines) + b'["warning",0,5]\n["warning",-1,"c"]\n' + made(0, loss=1.0)
    shown = ["rank 1: a red", "rank 1: b"] * 2  # there is no third attempt
    assert reports.take(Log(1, REPORTS, 0, data)) == shown
    assert reports.take(Log(1, REPORTS, 0, data)) == reports.take(Log(0, REPORTS, 0, data)) == []
    many = b"".join(pack(Warned(0, f"{number} {'é' * 70_000}")) for number in range(1000))
    kept = reports.take(Log(1, REPORTS, len(data), many))
    assert len(kept) < 100
    assert all(len(text) < 5000 for text in kept)
    assert len(reports.metrics) == 2


def test_rank_0_says_where_each_attempt_begins() -> None:
    reports = Reports(2, 2)
    others, own, later = Resumed(0, 9, "/other/step-9"), Resumed(0, None, "/runs"), Resumed(1, 2, "/runs/step-2", 1.5)
    data = pack(others) + pack(own)
    assert reports.take(Log(1, REPORTS, 0, data)) == []
    assert reports.take(Log(0, REPORTS, 0, data)) == [others, own]
    last = pack(later) + pack(own) + pack(Resumed(2, 3, "/runs/step-3"))  # of an earlier and of no attempt
    assert reports.take(Log(0, REPORTS, len(data), last)) == [later]
    assert reports.resumed == later


def test_a_failed_save_counts_until_the_next_one_succeeds() -> None:
    reports, lines = Reports(2, 1), [Committed(0, 1.0, 1, "/runs/step-1"), Unsaved(0, 2, "the disk is full")]
    data = b"".join(pack(line) for line in lines)
    reports.take(Log(0, REPORTS, 0, data))
    assert (reports.unsaved, reports.last_committed) == (lines[1], lines[0])
    reports.take(Log(0, REPORTS, len(data), pack(Committed(0, 3.0, 3, "/runs/step-3"))))
    assert reports.unsaved is None
    assert [course.saved for course in reports.courses(1)] == [3, None]


@pytest.mark.slow
def test_whoever_has_the_token_fills_no_memory() -> None:
    reports, offset = Reports(64, 1), 0
    piece = b"".join(made(number, loss=1.0) for number in range(5000))
    for _ in range(40):
        reports.take(Log(0, REPORTS, offset, piece))
        offset += len(piece)
    assert sum(len(pack(report)) for report in reports._kept[0, 0].reports) <= 2 * form.room(64)
    assert reports.metrics.dropped == 0  # the same numbers again and again


def test_rows_are_in_order_of_attempts_and_times() -> None:
    first = Log(1, REPORTS, 0, made(5) + made(6, attempt=1))
    metrics = taken(first, Log(0, REPORTS, 0, made(2) + made(7, attempt=1)), attempts=2).metrics
    assert [(row.attempt, row.rank, row.step) for row in metrics] == [(0, 0, 2), (0, 1, 5), (1, 1, 6), (1, 0, 7)]


def test_a_clock_that_is_set_back_changes_no_order() -> None:
    data = b"".join(pack(Report(n, 0, 0, time, n, None, {"loss": -n})) for n, time in enumerate((100.0, 101.0, 50.0)))
    reports = taken(Log(0, REPORTS, 0, data))
    assert [row.step for row in reports.metrics] == [0, 1, 2]
    assert reports.metrics.latest == reports.latest == {"loss": -2}


def test_a_first_step_stays_where_it_was_whatever_clocks_are_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, clock = [1000.0], 7.0
    monkeypatch.setattr(driver, "time", SimpleNamespace(time=lambda: wall[0], monotonic=lambda: clock))
    reports = Reports(1, 2)
    for attempt, at in ((0, 998.0), (1, 5000.0)):  # the second rank's host is an hour ahead
        reports.take(Log(attempt, REPORTS, 0, pack(Report(0, 0, attempt, at, 1, None))))
    wall[0] -= 3600.0
    assert [course.first for course in reports.courses(1)] == [5.0, 7.0]


def test_callbacks_that_are_too_slow_get_the_last_rows_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_MOST_NEW", 3)
    reports, data = Reports(1, 1), b"".join(made(number) for number in range(4))
    reports.new()
    (warning,) = reports.take(Log(0, REPORTS, 0, data))
    assert warning.startswith("callbacks are slower than reports: only the last 3 wait for them")
    assert reports.take(Log(0, REPORTS, len(data), made(4))) == []
    assert [row.step for row in reports.new() if isinstance(row, Row)] == [2, 3, 4]
    assert len(reports.metrics) == 5


def test_the_latest_values_are_those_of_the_lowest_rank_that_has_them() -> None:
    reports = taken(
        Log(1, REPORTS, 0, made(0, loss=9.0, only=3.0)), Log(0, REPORTS, 0, made(0, loss=1.0) + made(1, loss=0.5))
    )
    assert reports.latest == reports.metrics.latest == {"loss": 0.5, "only": 3.0}


def test_the_latest_values_are_those_of_the_latest_attempt() -> None:
    reports = taken(
        Log(0, REPORTS, 0, made(0, loss=1.0) + made(0, attempt=1, lr=0.5)),
        Log(1, REPORTS, 0, made(7, loss=3.0)),
        attempts=2,
    )
    assert reports.latest == {"lr": 0.5}


def test_names_without_end_take_bounded_memory() -> None:
    data = b"".join(made(number, **{f"loss-{number}": 1.0}) for number in range(3000))
    assert len(taken(Log(0, REPORTS, 0, data)).latest) == 1000


def test_progress_is_that_of_the_lowest_rank_with_steps_in_the_latest_attempt() -> None:
    assert Reports(1, 1).progress is None
    told = pack(Report(3, 0, 0, 103.0, 3, 50))
    one = Log(1, REPORTS, 0, told + b"".join(made(number) for number in range(4, 2000)))
    zero = Log(0, REPORTS, 0, pack(Report(0, 0, 0, 1.0, None, None, {"loss": 1.0})))
    reports = taken(zero, one, attempts=2)
    assert reports.progress == Progress(1999, 50, 1.0)
    assert Progress(40, 50, 2.0).seconds_left == 5.0
    assert Progress(60, 50, 2.0).seconds_left == 0.0
    assert Progress(40, 50, None).seconds_left is None
    reports.take(Log(1, REPORTS, reports.received(1), made(7, attempt=1)))
    assert reports.progress == Progress(7, None, None)


def test_progress_stays_while_a_rank_reports_without_steps() -> None:
    others = [pack(Report(number, 0, 0, 103.0, None, None, {"norm": 1.0})) for number in range(1, 2000)]
    reports = taken(Log(0, REPORTS, 0, made(0) + b"".join(others)), Log(1, REPORTS, 0, made(7)))
    assert reports.progress == Progress(0)


ROWS = Metrics(
    (
        Row(0, 1, 10.0, 0, {"loss": 0.5, "rank": 7.0}),
        Row(0, None, 11.0, 1, {"loss": 1}),
        Row(1, 2, 12.0, 0, {"accuracy": 0.5}),
    )
)


def test_as_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    frame = ROWS.to_pandas()
    assert list(frame.columns) == ["attempt", "step", "time", "rank", "loss", "value.rank", "accuracy"]
    assert frame["rank"].tolist() == [0, 1, 0]
    assert frame["step"].tolist() == [1, pandas.NA, 2]
    assert frame["loss"].tolist()[:2] == [0.5, 1.0]
    later = Metrics((Row(0, (1 << 62) + 1, 10.0, 0, {}), Row(0, None, 11.0, 0, {})))
    assert later.to_pandas()["step"].tolist() == [(1 << 62) + 1, pandas.NA]
    assert list(Metrics().to_pandas().columns) == ["attempt", "step", "time", "rank"]
    taken = Metrics((Row(0, 1, 10.0, 0, {"time": 1.0, "value.time": 2.0}),)).to_pandas()
    assert taken.iloc[0, 4:].to_dict() == {"value.value.time": 1.0, "value.time": 2.0}


def test_as_an_arrow_table() -> None:
    pytest.importorskip("pyarrow")
    table = ROWS.to_arrow()
    assert table["step"].to_pylist() == [1, None, 2]
    assert table["value.rank"].to_pylist() == [7.0, None, None]
    assert str(table["loss"].type) == "double"
    assert Metrics().to_arrow().num_rows == 0


def test_as_a_picture() -> None:
    pytest.importorskip("matplotlib")
    plots = ROWS.plot().axes
    assert [plot.get_title() for plot in plots] == ["loss", "rank", "accuracy"]
    assert [plot.get_xlabel() for plot in plots] == ["seconds", "step", "step"]


@pytest.mark.parametrize(("ask", "package"), [("to_pandas", "pandas"), ("to_arrow", "pyarrow"), ("plot", "matplotlib")])
def test_a_missing_package_is_named(ask: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (package, f"{package}.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=rf"{ask}\(\) needs {package}, which is not installed: pip install"):
        getattr(ROWS, ask)()


def test_metrics_are_a_sequence() -> None:
    assert len(ROWS) == 3
    assert ROWS[-1].values == {"accuracy": 0.5}
    assert repr(ROWS) == "<Metrics: 3 rows, loss, rank, accuracy>"
    assert repr(Metrics(ROWS.rows[:1])) == "<Metrics: 1 row, loss, rank>"
    assert repr(Metrics()) == "<Metrics: 0 rows, no values>"
