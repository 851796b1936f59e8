"""Holding a name or folder: two drivers, drivers that have ended, and stores that fail."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import watch
from jobs import make_job

from distributor import Checkpoints
from distributor.errors import ConfigurationError, RunCancelledError, StartError
from distributor.machine import processes
from distributor.machine.storage import Folder
from distributor.run import lease
from distributor.run.lease import Lease, Times, hold
from distributor.values import lease_record
from distributor.values.job import Job
from distributor.values.lease_record import FILES, Holder, Identity, LeaseRecord, Resume
from distributor.values.sealed import seal

#: Renewed often, so that tests need not wait.
TIMES = Times(renew=0.05, expire=1.0, settle=0.05, look=0.02)


def job(place: Path, run: str = "a0", resume: Resume = "auto", **arguments: str) -> Job:
    identity = Identity("gpt", resume, "train", "code", arguments, arguments)
    made = make_job(run, 1)
    return replace(made, checkpoints=Checkpoints(str(place)), identity=identity)


@contextmanager
def held(
    asked: Job, lost: Callable[[str], object] = print, wanted: Callable[[], bool] = lambda: True, times: Times = TIMES
) -> Iterator[Lease]:
    with hold(asked, wanted, lost, times) as made:
        yield made


def record(place: Path) -> LeaseRecord:
    return record_of(place / "gpt")


def write(place: Path, claim: LeaseRecord) -> None:
    Folder(place / "gpt").write(FILES[claim.sequence % 2], seal(claim))


def of_another(run: str = "z9", **about: Any) -> Holder:
    return replace(Holder(run, "host-z", "machine-z", 1, "1"), **about)


def unnamed(place: Path, run: str = "a0") -> Job:
    return replace(job(place, run), identity=None)


def record_of(folder: Path) -> LeaseRecord:
    found = lease_record.find(Folder(folder).read)
    assert found is not None
    return found


def test_a_run_without_checkpoints_holds_nothing(tmp_path: Path) -> None:
    asked = replace(unnamed(tmp_path), checkpoints=None)
    with held(asked) as made:
        assert made.job is asked
        made.release(finished=True)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_name_holds_its_folder(tmp_path: Path) -> None:
    with held(unnamed(tmp_path)) as made:
        assert made.job.checkpoints == Checkpoints(str(tmp_path))
        assert made.job.fence == lease_record.FencingToken(str(tmp_path), "a0", is_named=False)
        with pytest.raises(StartError, match=f"the folder '{tmp_path}' for checkpoints is held by run a0 of this pro"):
            with held(unnamed(tmp_path, "b1")):
                pass
        assert made.advance(replace(made.job, attempt=2)).fence == replace(made.job.fence, attempt=2)
        made.release(finished=True)
    ended = record_of(tmp_path)
    assert (ended.run, ended.holder, ended.finished, ended.attempt) == ("a0", None, False, 2)
    with held(unnamed(tmp_path, "b1")):  # it goes on at once, however often the training has finished
        assert (record_of(tmp_path).run, record_of(tmp_path).attempt) == ("b1", 0)


def test_a_folder_may_be_that_of_a_name(tmp_path: Path) -> None:
    """Each run keeps what the record says of the other's training."""
    with held(unnamed(tmp_path / "gpt")), pytest.raises(StartError), held(job(tmp_path, "b1")):
        pass
    with held(job(tmp_path, "b1")) as made:
        made.release(finished=True)
    with held(unnamed(tmp_path / "gpt")):
        pass
    assert (record(tmp_path).target, record(tmp_path).finished) == ("train", True)


def test_without_a_name_a_driver_that_cannot_reach_the_folder_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    asked = unnamed(tmp_path / "file" / "runs")
    with held(asked) as made:
        assert made.job is asked
    assert "cannot be used by the driver, so it does not see whether another run uses them" in caplog.text


def test_a_run_holds_its_name_until_it_ends(tmp_path: Path) -> None:
    with held(job(tmp_path)) as made:
        assert made.job.checkpoints is not None
        assert made.job.checkpoints.dir == str(tmp_path / "gpt" / "1")
        assert made.job.fence == lease_record.FencingToken(str(tmp_path / "gpt"), "a0")
        first = record(tmp_path)
        assert first.holder is not None and first.holder.run == "a0"
        watch.until(lambda: record(tmp_path).sequence > first.sequence + 3)
        made.release(finished=True)
    ended = record(tmp_path)
    assert (ended.finished, ended.holder, ended.run) == (True, None, "a0")
    with pytest.raises(ConfigurationError, match="has finished"), held(job(tmp_path, "b1")):
        pass
    with held(job(tmp_path, "b1", "never")) as made:
        assert made.job.checkpoints is not None
        assert made.job.checkpoints.dir == str(tmp_path / "gpt" / "2")
    assert (record(tmp_path).finished, record(tmp_path).holder) == (False, None)  # it has not said that it finished


def test_what_has_changed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held(job(tmp_path, lr="1")):
        pass
    with held(job(tmp_path, "b1", lr="2")):
        pass
    assert "run b1: this run differs from the last one of its name (run a0) in lr (now 2)" in caplog.text


def test_two_runs_of_one_name(tmp_path: Path) -> None:
    with held(job(tmp_path)):
        with pytest.raises(StartError, match=r"the name 'gpt' is held by run a0 of this process: .*\.runs\(\)\.active"):
            with held(job(tmp_path, "b1")):
                pass
        assert record(tmp_path).run == "a0"


def test_a_study_that_this_process_has_is_no_run_with_a_handle(tmp_path: Path) -> None:
    first, second = (replace(job(tmp_path, run), identity=None) for run in ("a0", "b1"))
    about: Any = {"storage": Folder(tmp_path), "thing": "the study 'digits'"}
    with hold(first, lambda: True, print, TIMES, **about):
        with pytest.raises(StartError, match=r"'digits' is held by run a0 of process \d+ on .* or pass another name"):
            with hold(second, lambda: True, print, TIMES, **about):
                pass


def test_of_two_drivers_that_begin_a_study_at_once_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about: Any = {"storage": Folder(tmp_path), "thing": "the study 'digits'"}
    sleep = lease.time.sleep

    def overtaken(seconds: float) -> None:
        other = replace(record_of(tmp_path), run="z9", holder=of_another())
        Folder(tmp_path).write(FILES[other.sequence % 2], seal(other))
        sleep(seconds)

    monkeypatch.setattr(lease.time, "sleep", overtaken)
    with pytest.raises(StartError, match="the study 'digits' is held by run z9 of process 1 on host-z"):
        with hold(unnamed(tmp_path), lambda: True, print, TIMES, **about):
            pass


def test_a_study_whose_folder_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    about: Any = {"storage": Folder(tmp_path / "file" / "digits"), "thing": "the study 'digits'"}
    with pytest.raises(StartError, match=r"the study 'digits' cannot be kept in .*: .*file"):
        with hold(unnamed(tmp_path), lambda: True, print, TIMES, **about):
            pass


def test_a_holder_that_has_ended_here_is_followed_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pid = process.pid
    ended = Holder("z9", "host", processes.pid_scope(), pid, "1")
    write(tmp_path, LeaseRecord(7, 3, "train", "code", {}, False, "z9", ended))
    patient = replace(TIMES, expire=10 * watch.DEADLINE)
    with held(job(tmp_path), times=patient) as made:
        assert made.job.checkpoints is not None
        assert made.job.checkpoints.dir.endswith("/3")


def test_a_holder_that_renews_no_more_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, LeaseRecord(7, 3, "train", "code", {}, False, "z9", of_another()))
    with held(job(tmp_path)):
        assert record(tmp_path).run == "a0"
    assert "run a0: run z9 of process 1 on host-z holds the name 'gpt': waiting to see" in caplog.text


def test_a_run_that_is_cancelled_while_it_waits(tmp_path: Path) -> None:
    write(tmp_path, LeaseRecord(7, 3, "train", "code", {}, False, "z9", of_another()))
    with pytest.raises(RunCancelledError, match="while it waited for another run to release the name 'gpt'"):
        with held(job(tmp_path), wanted=lambda: False, times=replace(TIMES, expire=10 * watch.DEADLINE)):
            pass
    assert record(tmp_path).run == "z9"


def test_a_run_whose_name_was_taken_hears_of_it(tmp_path: Path) -> None:
    heard: list[str] = []
    told = threading.Event()
    with pytest.raises(RunCancelledError, match="run a0 was cancelled: run z9 of process 1 on host-z holds the name"):
        with held(job(tmp_path), lambda text: (heard.append(text), told.set())) as made:
            taken = replace(record(tmp_path), sequence=1000, run="z9", holder=of_another())
            watch.until(
                lambda: write(tmp_path, taken) or told.is_set()
            )  # it renews, as this run may at the same moment
            made.release(finished=True)
    assert heard == ["run z9 of process 1 on host-z holds the name 'gpt' now"]
    assert record(tmp_path).run == "z9"


def test_a_record_that_was_removed_is_no_other_runs(tmp_path: Path) -> None:
    """As where the code removes its checkpoints at its end, or a mount is gone for a while."""
    heard: list[str] = []
    folder = tmp_path / "runs"
    with held(unnamed(folder), heard.append) as made:
        for number in range(2):
            watch.until(lambda: bool(heard) or lease_record.find(Folder(folder).read) is not None)
            folder.rename(tmp_path / f"removed-{number}")
        made.release(finished=True)
    assert heard == []


def test_of_two_that_write_at_once_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run writes its claim just after this one's."""
    sleep = lease.time.sleep

    def overtaken(seconds: float) -> None:
        write(tmp_path, replace(record(tmp_path), run="z9", holder=of_another()))
        sleep(seconds)

    monkeypatch.setattr(lease.time, "sleep", overtaken)
    with pytest.raises(StartError, match="the name 'gpt' is held by run z9 of process 1 on host-z"):
        with held(job(tmp_path)):
            pass
    assert record(tmp_path).run == "z9"


def test_many_at_once(tmp_path: Path) -> None:
    """However they meet, exactly one ends well; others are refused, or hear that they have lost the name."""
    together, ended, over = threading.Barrier(6), threading.Semaphore(0), threading.Event()
    outcomes: list[type[Exception] | None] = []

    def compete(number: int) -> None:
        together.wait()
        try:
            with held(job(tmp_path, f"{number:02}")) as made:
                ended.release()
                over.wait(watch.DEADLINE)
                made.release(finished=True)
            outcomes.append(None)
        except (StartError, RunCancelledError) as error:
            outcomes.append(type(error))
            ended.release()

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert ended.acquire(timeout=watch.DEADLINE)
    over.set()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 6
    assert outcomes.count(None) == 1


def test_a_place_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, it is an error; later, the run goes on and renews its hold when it can."""
    write_file, down = Folder.write, threading.Event()

    def failing(self: Folder, name: str, data: bytes) -> None:
        if down.is_set():
            raise OSError("the store is down")
        write_file(self, name, data)

    monkeypatch.setattr(Folder, "write", failing)
    down.set()
    with pytest.raises(StartError, match=r"cannot be used by the driver: the store is down"), held(job(tmp_path)):
        pass
    down.clear()
    with held(job(tmp_path)) as made:
        down.set()
        watch.until(lambda: "run a0: cannot renew its lease of the name 'gpt': the store is down" in caplog.text)
        down.clear()
        before = record(tmp_path).sequence
        watch.until(lambda: record(tmp_path).sequence > before)
        down.set()
        made.release(finished=True)
    told = "cannot release the name 'gpt', so the next run must wait, and then continues this training"
    assert caplog.text.count(told) == 1


def test_a_url(tmp_path: Path) -> None:
    asked = replace(job(tmp_path), checkpoints=Checkpoints(f"file://{tmp_path}"))
    with held(asked) as made:
        assert made.job.checkpoints is not None
        assert made.job.checkpoints.dir == f"file://{tmp_path}/gpt/1"
        assert record(tmp_path).run == "a0"
        made.release(finished=False)
    assert record(tmp_path).holder is None


def test_a_url_that_cannot_be_opened(tmp_path: Path) -> None:
    asked = replace(job(tmp_path), checkpoints=Checkpoints("nowhere://run"))
    told = "checkpoints 'nowhere://run' cannot be used by the driver: Protocol not known"
    with pytest.raises(StartError, match=told), held(asked):
        pass


def test_a_name_that_could_not_be_given_back_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that the training has finished as soon as the store takes it."""
    write_file, fails = Folder.write, [True]

    def failing(self: Folder, name: str, data: bytes) -> None:
        if b'"holder": null' in data and fails:
            fails.pop()
            raise OSError("the store is down")
        write_file(self, name, data)

    monkeypatch.setattr(Folder, "write", failing)
    with held(job(tmp_path), times=replace(TIMES, renew=watch.DEADLINE)) as made:
        made.release(finished=True)
        assert not record(tmp_path).finished
    assert (record(tmp_path).finished, record(tmp_path).holder) == (True, None)


@pytest.mark.parametrize("unknown", ["machine", "started"])
def test_what_a_system_does_not_tell_is_no_end(tmp_path: Path, unknown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without boot identifiers or start times, only silence means that a holder has ended."""
    if unknown == "machine":
        monkeypatch.setattr(processes, "pid_scope", lambda: "")
    else:
        monkeypatch.setattr(processes, "start_time", lambda pid: None)
    with held(job(tmp_path)):
        with pytest.raises(StartError, match="is held by run a0"), held(job(tmp_path, "b1")):
            pass


def test_a_slow_first_look_takes_no_name_of_a_run_that_renews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a URL answers only after several attempts."""
    clock, looks = [0.0], 0

    def read(made: Lease) -> LeaseRecord:
        nonlocal looks
        looks += 1
        clock[0] += 10.0 if looks == 1 else 0.1
        return LeaseRecord(1 if looks < 3 else 2, 1, "train", "code", {}, False, "z9", of_another())

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(Lease, "read", read)
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with pytest.raises(StartError, match="is held by run z9"):
        with held(job(tmp_path), times=Times(expire=8.0)):
            pass
    assert not list(tmp_path.rglob("lease-*"))


@pytest.mark.parametrize(("failures", "recovers"), [(4, True), (5, False)])
def test_a_further_job_waits_for_a_place_that_fails_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, recovers: bool
) -> None:
    clock, left = [0.0], [0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    class Failing(Folder):
        def read(self, name: str) -> bytes | None:
            if left[0]:
                left[0] -= 1
                raise OSError(errno.ESTALE, "Stale file handle")
            return super().read(name)

    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    asked = unnamed(tmp_path)
    asked = replace(asked, fence=lease_record.FencingToken(str(tmp_path), asked.run_id, is_named=False), attempt=2)
    made = Lease(asked, Failing(tmp_path), Times(expire=3.5, look=1.0))
    made.acquire(lambda: True)
    left[0] = failures
    if not recovers:
        with pytest.raises(OSError, match="Stale"):
            made.advance(asked)
        return
    assert made.advance(asked).fence == replace(asked.fence, attempt=2)  # type: ignore[type-var]
    assert record_of(tmp_path).attempt == 2
