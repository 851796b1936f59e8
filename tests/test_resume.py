"""Named trainings: a driver that is killed, and the same call again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpointed
import pytest
import victims
import watch
from sessions import LOCAL, MASTERS, Make

from distributor import ConfigurationError, Distributor, Run, StartError, Status, TrainingError, runs
from distributor.machine.storage import Folder
from distributor.values import lease_record
from distributor.values.lease_record import FILES, LeaseRecord

PROGRAM = str(Path(__file__).parent / "support" / "resumed.py")

STEPS = 30


class Driver:
    """A driver in a process of its own."""

    def __init__(self, mode: str, folder: Path, pause: float) -> None:
        command = [sys.executable, PROGRAM, mode, str(folder), str(STEPS), str(pause)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.run = self._process.stdout.readline().strip()
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
        watch.gone(self.run)

    def result(self) -> dict[str, Any]:
        out, err = self._process.communicate(timeout=2 * watch.DEADLINE)
        assert self._process.returncode == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def error(self) -> str:
        _, err = self._process.communicate(timeout=2 * watch.DEADLINE)
        assert self._process.returncode != 0
        return err


@contextmanager
def driver(mode: str, folder: Path, pause: float = 0.0) -> Iterator[Driver]:
    made = Driver(mode, folder, pause)
    try:
        yield made
    finally:
        made._process.kill()
        made._process.communicate()


def steps(folder: Path, training: int = 1) -> list[int]:
    return checkpointed.committed(folder / "digits" / str(training))


def claim(folder: Path) -> LeaseRecord | None:
    return lease_record.find(Folder(folder / "digits").read)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [LOCAL, pytest.param(MASTERS[-1], marks=[pytest.mark.spark, pytest.mark.long])])
def test_a_driver_that_is_killed_twice(mode: str, tmp_path: Path, make_local: Make) -> None:
    """The same program again goes on bit by bit; when it has finished, it does not train again."""
    _, undisturbed, _ = make_local(2, checkpoints=tmp_path / "undisturbed").run(checkpointed.train_digits, STEPS)
    for least in (5, 15):
        with driver(mode, tmp_path, pause=0.1) as killed:
            watch.until(lambda least=least: max(steps(tmp_path), default=0) >= least, 2 * watch.DEADLINE)  # type: ignore[misc]
            killed.kill()
    with driver(mode, tmp_path) as last:
        found = last.result()
    assert found["begun"] >= 15
    assert (found["weights"], found["seen"]) == (undisturbed, STEPS * 16)
    ended = claim(tmp_path)
    assert ended is not None
    assert (ended.finished, ended.holder, ended.training, ended.run) == (True, None, 1, last.run)
    with driver(mode, tmp_path) as again:
        assert "ConfigurationError: the run named 'digits' has finished" in again.error()


@pytest.mark.long
def test_a_driver_that_stands_still_loses_its_name(tmp_path: Path, make_local: Make) -> None:
    """Another goes on in its place. When it wakes up, it ends, and has committed nothing more."""
    _, undisturbed, _ = make_local(2, checkpoints=tmp_path / "undisturbed").run(checkpointed.train_digits, STEPS)
    with driver(LOCAL, tmp_path, pause=1.0) as frozen:  # its ranks go on, and must not finish before it has expired
        watch.until(lambda: max(steps(tmp_path), default=0) >= 3, 2 * watch.DEADLINE)
        os.kill(frozen.pid, signal.SIGSTOP)
        with driver(LOCAL, tmp_path, pause=0.5) as other:
            taken = claim(tmp_path)
            watch.until(lambda: (taken := claim(tmp_path)) is not None and taken.run == other.run)
            assert taken is not None
            os.kill(frozen.pid, signal.SIGCONT)
            told = frozen.error()
            assert (
                f"RunCancelledError: run digits ({frozen.run}) was cancelled: run {other.run} of process {other.pid}"
                in told
            )
            found = other.result()
    assert found["weights"] == undisturbed
    folders = [path.name for path in (tmp_path / "digits" / "1").glob("step-*")]
    assert all(f"-{other.run}-" in name for name in folders)
    watch.gone(frozen.run)


def test_ranks_commit_nothing_once_the_name_is_lost(make_local: Make, tmp_path: Path) -> None:
    """The driver does not hear of it in time; the ranks look themselves."""
    run = named(tmp_path).submit(save_after_a_loss, str(tmp_path))
    assert run.wait(watch.DEADLINE)
    assert checkpointed.committed(tmp_path / "digits" / "1") == [1]


def save_after_a_loss(folder: str, name: str = "digits") -> None:
    """Saves, gives the name or folder to another run, and saves again."""
    from dataclasses import replace

    from distributor import runtime
    from distributor.machine.storage import Folder
    from distributor.values import lease_record
    from distributor.values.sealed import seal

    runtime.save_checkpoint({"value": 1}, 1, wait=True)
    place = Folder(Path(folder, name))
    found = lease_record.find(place.read)
    assert found is not None and found.holder is not None
    taken = replace(found, sequence=found.sequence + 1000, run="z9", holder=replace(found.holder, run="z9"))
    place.write(lease_record.FILES[taken.sequence % 2], seal(taken))
    runtime.save_checkpoint({"value": 2}, 2, wait=True)


@pytest.mark.slow
def test_ranks_of_an_earlier_job_commit_nothing(tmp_path: Path) -> None:
    """A node that was cut off reaches the place again while the run goes on elsewhere."""
    run = named(tmp_path, max_restarts=1).submit(save_from_two_jobs, str(tmp_path))
    watch.until((tmp_path / "ready").exists)
    victims.part(run, "agent").kill()
    assert run.result(watch.DEADLINE) == "attempt 1 of this run has begun: earlier attempts can commit no checkpoints"
    assert checkpointed.committed(tmp_path / "digits" / "1") == [2, 1]


def save_from_two_jobs(folder: str) -> str:
    """Saves a step in each attempt. The second one plays the first, too, and returns what stops that."""
    import time

    from distributor import runtime
    from distributor.checkpoint.context import Session
    from distributor.values.checkpoints import SETTINGS, from_environ

    runtime.save_checkpoint({"value": 1}, 1 + runtime.attempt(), wait=True)
    if runtime.attempt() == 0:
        Path(folder, "ready").touch()
        time.sleep(600)
    settings = from_environ({SETTINGS: os.environ[SETTINGS].replace('"attempt": 1', '"attempt": 0')})
    try:
        Session(settings).check_fence()
    except OSError as error:
        return str(error)
    return ""


def named(folder: Path, **options: Any) -> Distributor:
    return Distributor(1, True, False, name="digits", checkpoints=folder, grace_period=1.0, **options)


def count(to: int, fails: bool = False) -> tuple[int, int]:
    """Counts on, with a checkpoint for each number. Where it began, and the sum."""
    from distributor import runtime

    state = {"sum": 0}
    begun = runtime.load_checkpoint(state) or 0
    for step in range(begun + 1, to + 1):
        state["sum"] += step
        runtime.save_checkpoint(state, step, wait=True)
    if fails:
        raise ValueError("not finished")
    return begun, state["sum"]


def other() -> None:
    pass


@pytest.mark.slow
def test_what_a_name_goes_on_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match="resume='must', but there is no run named 'digits' to go on with"):
        named(tmp_path, resume="must").run(count, 2)
    with pytest.raises(Exception, match="not finished"):
        named(tmp_path).run(count, 2, fails=True)
    with pytest.raises(ConfigurationError, match="the run named 'digits' trains with 'count', and not with 'other'"):
        named(tmp_path).run(other)
    assert named(tmp_path, resume="must").run(count, 4) == (2, 10)
    assert "this run differs from the last one of its name" in caplog.text
    assert "in fails (now left out), to (now 4)" in caplog.text
    with pytest.raises(ConfigurationError, match=r"the run named 'digits' has finished .* pass resume='never'"):
        named(tmp_path).run(count, 4)
    assert named(tmp_path).run(count, 6) == (4, 21)
    assert "in to (now 6), which had finished, and goes on from its last checkpoint" in caplog.text
    assert named(tmp_path, resume="never").run(count, 3) == (0, 6)
    assert [steps(tmp_path, training)[0] for training in (1, 2)] == [6, 3]


def load_another(folder: str) -> tuple[int | None, int]:
    from distributor import runtime

    state = {"sum": 0}
    return runtime.load_checkpoint(state, folder=folder), state["sum"]


@pytest.mark.long
def test_checkpoints_of_another_run_are_loaded_by_its_name_or_folder(tmp_path: Path) -> None:
    named(tmp_path).run(count, 2)
    letters = Distributor(2, True, False, name="letters", checkpoints=tmp_path, resume="never")
    assert letters.run(load_another, "digits") == (2, 3)
    elsewhere = Distributor(2, True, False)
    assert elsewhere.run(load_another, str(tmp_path / "digits")) == (2, 3)
    with pytest.raises(
        TrainingError, match=r"there is no checkpoint in '.*', which has the folders of named runs: pass"
    ):
        elsewhere.run(load_another, str(tmp_path))


def test_two_runs_of_one_name_at_once(tmp_path: Path) -> None:
    first = named(tmp_path).submit(wait_for, str(tmp_path / "go"))
    watch.until(lambda: first.status is Status.RUNNING)
    second = named(tmp_path).submit(wait_for, str(tmp_path / "go"))
    with pytest.raises(StartError, match=rf"the name 'digits' is held by run {first.id} of this process"):
        second.result(watch.DEADLINE)
    assert runs().active == [first]
    (tmp_path / "go").touch()
    assert first.result(watch.DEADLINE) is None


@pytest.mark.long
def test_two_runs_in_one_folder_of_checkpoints(tmp_path: Path) -> None:
    """The second is refused while the first is alive, and goes on from its checkpoint afterwards."""
    distributor = Distributor(1, True, False, checkpoints=tmp_path)
    first = distributor.submit(wait_for, str(tmp_path / "go"))
    watch.until(lambda: first.status is Status.RUNNING)
    with pytest.raises(StartError, match=rf"the folder '{tmp_path}' for checkpoints is held by run {first.id} of"):
        distributor.run(count, 2)
    (tmp_path / "go").touch()
    assert first.result(watch.DEADLINE) is None
    assert distributor.run(count, 2) == (0, 3)
    assert distributor.run(count, 3) == (2, 6)


def test_ranks_commit_nothing_in_a_folder_that_another_run_holds(tmp_path: Path) -> None:
    run = Distributor(1, True, False, checkpoints=tmp_path, grace_period=1.0).submit(
        save_after_a_loss, str(tmp_path), ""
    )
    assert run.wait(watch.DEADLINE)
    assert checkpointed.committed(tmp_path) == [1]


def wait_for(path: str) -> None:
    import time

    while not Path(path).exists():
        time.sleep(0.02)


def test_a_run_that_waits_for_its_name_can_be_cancelled(tmp_path: Path, frozen: Callable[[Path], None]) -> None:
    frozen(tmp_path)
    run = named(tmp_path).submit(count, 2)
    watch.until(lambda: run.status is Status.WAITING)
    run.cancel()
    assert run.wait(watch.DEADLINE)
    assert run.status is Status.CANCELLED


@pytest.fixture
def frozen() -> Callable[[Path], None]:
    """Writes the claim of a run that is neither there nor gone."""
    from distributor.values.lease_record import Holder
    from distributor.values.sealed import seal

    def write(folder: Path) -> None:
        holder = Holder("z9", "host-z", "machine-z", 1, "1")
        Folder(folder / "digits").write(FILES[1], seal(LeaseRecord(1, 1, "count", "", {}, False, "z9", holder)))

    return write


def test_a_driver_that_sees_another_folder_than_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributor.run import lease

    elsewhere = Folder(tmp_path / "elsewhere")
    monkeypatch.setattr(lease, "open_storage", lambda *_: elsewhere)
    with pytest.raises(
        StartError, match="the driver must see the same folder as the ranks. Pass a URL as checkpoints=, or omit name="
    ):
        named(tmp_path).run(count, 2)


@pytest.mark.long
def test_the_example_goes_on(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "resume.py"
    assert len(example.read_text().splitlines()) < 60
    told = subprocess.run(
        [sys.executable, example, tmp_path], capture_output=True, text=True, timeout=2 * watch.DEADLINE
    )
    assert told.returncode == 0, told.stderr
    first, lost, last = told.stdout.splitlines()
    assert first.startswith("went on from step 100; loss ")
    assert lost.startswith("attempt 0, ") and lost.endswith(" last step 100: rank 1 failed: killed by SIGKILL")
    assert last.startswith("attempt 1, ") and last.endswith(" last step 300: it succeeded")


def test_a_run_is_named_in_scripts_and_modules_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from distributor import runtime\nruntime.save_checkpoint({'x': 1}, 1, wait=True)\n")
    run: Run = named(tmp_path).submit(str(script), "--lr", 1)
    assert run.wait(watch.DEADLINE)
    found = claim(tmp_path)
    assert found is not None
    assert (found.target, found.finished, sorted(found.arguments)) == ("train.py", True, ["argument 1", "argument 2"])
