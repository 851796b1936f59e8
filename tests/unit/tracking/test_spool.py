"""What is to be sent, as a driver that was killed has left it."""

import errno
import math
import os
import stat

import pytest

from distributor.tracking import spool as module
from distributor.tracking.spool import Params, RunBegun, RunEnded, Spool, Values

BEGIN = RunBegun("a", None, "a", 0.0, "/", "train")


@pytest.fixture
def left(tmp_path):
    """A file of three reports, and of the end of its run."""
    spool = Spool.create(tmp_path, BEGIN)
    for step in range(3):
        spool.append(Values(step, 0.0, {"loss": 1.0}))
    spool.append(RunEnded("FINISHED", 1.0))
    spool.release()
    return spool.path


def sent(spool):
    steps = []
    while entries := spool.read()[0]:
        assert len(entries) == 1 or not isinstance(entries[-1], RunEnded)
        steps += [getattr(each, "step", "end") for each in entries if not isinstance(each, RunBegun)]
        spool.acknowledge(spool.read()[1])
    return steps


def test_the_end_of_a_run_is_sent_by_itself(tmp_path, left):
    (spool,) = Spool.left_in(tmp_path)
    assert sent(spool) == [0, 1, 2, "end"]


def test_what_a_full_disk_has_cut_is_left_out(tmp_path, left):
    left.write_bytes(left.read_bytes()[:-5])
    (spool,) = Spool.left_in(tmp_path)
    assert sent(spool) == [0, 1, 2] and not spool.is_whole


def test_a_line_longer_than_what_is_sent_together_is_sent(tmp_path):
    spool = Spool.create(tmp_path, BEGIN)
    spool.append(Params({f"p{number}": "x" * 500 for number in range(2000)}))
    spool.append(Values(1, 0.0, {"loss": 1.0}))
    spool.append(RunEnded("FINISHED", 1.0))
    spool.release()
    (left,) = Spool.left_in(tmp_path)
    found = []
    while entries := left.read()[0]:
        found += entries
        left.acknowledge(left.read()[1])
    assert [type(each) for each in found] == [RunBegun, Params, Values, RunEnded]
    assert len(found[1].params) == 2000


def test_much_that_cannot_be_read_holds_nothing_up(tmp_path, left):
    begin, *rest = left.read_bytes().splitlines(keepends=True)
    left.write_bytes(b"".join([begin, b"x" * (1 << 20), b"\n", *rest]))
    (spool,) = Spool.left_in(tmp_path)
    spool.acknowledge(len(begin))
    assert sent(spool) == [0, 1, 2, "end"]


def test_a_line_that_a_full_disk_has_cut_costs_no_other(tmp_path):
    spool = Spool.create(tmp_path, BEGIN)

    class Full:
        """A file of which only a part is written, as on a full disk."""

        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            return self._file.write(data[: len(data) // 2])

    spool.append(Values(0, 0.0, {"loss": 1.0}))
    real, spool._file = spool._file, Full(spool._file)
    for step in (1, 2):
        spool.append(Values(step, 0.0, {"loss": 1.0}))
    spool._file = real
    for step in (3, 4):
        spool.append(Values(step, 0.0, {"loss": 1.0}))
    assert sent(spool) == [0, 3, 4]


class NoRoom:
    """A file to which nothing can be written, as on a full disk."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_reports_but_not_the_end(tmp_path, caplog):
    spool = Spool.create(tmp_path, BEGIN)
    spool.append(Values(0, 0.0, {"loss": 1.0}))
    real, spool._file = spool._file, NoRoom(spool._file)
    spool.append(Values(1, 0.0, {"loss": 1.0}))
    spool._file = real
    spool.append(Values(2, 0.0, {"loss": 1.0}))
    spool._file = NoRoom(spool._file)
    spool.append(RunEnded("FINISHED", 1.0))
    for expected in ([0, 2], ["end"], ["end"]):
        entries, end = spool.read()
        assert [getattr(each, "step", "end") for each in entries if not isinstance(each, RunBegun)] == expected
        spool.acknowledge(end)
    assert caplog.text.count(f"reports are lost, since {spool.path} cannot be written") == 1


def test_what_is_sent_counts_as_sent_on_a_full_disk(tmp_path):
    spool = Spool.create(tmp_path, BEGIN)
    spool._acknowledged.mkdir()  # cannot be written
    for step in range(3):
        spool.append(Values(step, 0.0, {"loss": 1.0}))
    assert sent(spool) == [0, 1, 2]


def test_the_space_of_what_is_sent_is_freed_although_there_is_always_more(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LARGE", 1000)
    spool = Spool.create(tmp_path, BEGIN)
    found = []
    for step in range(0, 100, 2):
        spool.append(Values(step, 0.0, {"loss": 1.0}))
        entries, end = spool.read()
        spool.append(Values(step + 1, 0.0, {"loss": 1.0}))  # while these are sent
        found += [each.step for each in entries if isinstance(each, Values)]
        spool.acknowledge(end)
        assert spool.size < 1500
    spool.append(RunEnded("FINISHED", 1.0))
    spool.release()
    (left,) = Spool.left_in(tmp_path)
    assert [*found, *sent(left)] == [*range(100), "end"]
    left.remove()
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_reads_what_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LARGE", 0)
    spool = Spool.create(tmp_path, BEGIN)
    assert stat.S_IMODE(spool.path.stat().st_mode) == 0o600
    spool.acknowledge(spool.size)
    assert stat.S_IMODE(spool.path.stat().st_mode) == 0o600


def test_numbers_that_json_lacks_are_kept(tmp_path):
    spool = Spool.create(tmp_path, BEGIN)
    spool.append(Values.of(None, 0.0, {"a": math.inf, "b": math.nan, "c": 1}))
    assert spool.read()[0][-1].values == {"a": "inf", "b": "nan", "c": 1.0}


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 4096, b"[1, 2]\n", b"no end"], ids=["empty", "zeros", "other", "torn"]
)
def test_what_cannot_be_read_is_put_aside(tmp_path, left, content, caplog):
    left.write_bytes(content)
    assert Spool.left_in(tmp_path) == []
    aside = left.with_suffix(".unreadable")
    assert aside.read_bytes() == content
    assert f"{aside}, which an earlier driver has left, cannot be read" in caplog.text
    assert Spool.left_in(tmp_path) == []


def test_what_another_driver_has_or_removes_is_its_own(tmp_path, left, monkeypatch):
    (first,) = Spool.left_in(tmp_path)
    assert Spool.left_in(tmp_path) == []
    real = Spool.__post_init__

    def opened(self):
        real(self)
        if not first._file.closed:
            first.remove()  # between the opening and the locking by another driver

    monkeypatch.setattr(Spool, "__post_init__", opened)
    assert Spool.left_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
