"""How a rank's end reaches the driver, whatever the rank or its machine has broken."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import faults
import psutil
import pytest
import stores
import watch
from driver import driven
from sessions import Make

from distributor import ResultError, StartError, TrainingError, runtime
from distributor.values import messages


@pytest.mark.long_on_executors
@pytest.mark.parametrize("fault", faults.BREAKS)
def test_a_ranks_result_arrives_whatever_it_has_broken(make: Make, fault: str) -> None:
    assert make(2).submit(faults.break_then, fault, "return").results() == ["0", "1"]
    with pytest.raises(TrainingError, match=r"rank 1 on .* failed: ValueError: the learning rate must be") as caught:
        make(2).run(faults.break_then, fault, "raise")
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in break_then" in caught.value.traceback


def leave_while_others(wait: str) -> int:
    """The last rank leaves by os._exit in the first attempt; the others wait for it, or only sleep."""
    from distributor import runtime

    if runtime.attempt() == 0:
        if runtime.rank() == runtime.world_size() - 1:
            os._exit(0)
        if wait == "load":
            runtime.load_checkpoint({"step": 0})
        elif wait == "save":
            runtime.save_checkpoint({"step": 1}, 1, wait=True)
        elif wait == "folder":
            with runtime.checkpoint_folder(1):
                pass
        time.sleep(600)
    return runtime.attempt()


@pytest.mark.long_on_executors
@pytest.mark.parametrize(
    "wait", ["sleep", *(pytest.param(name, marks=pytest.mark.long) for name in ("load", "save", "folder"))]
)
def test_a_function_that_leaves_with_code_0_ends_its_attempt_at_once(make: Make, wait: str, tmp_path: Path) -> None:
    run = make(2, checkpoints=tmp_path, max_restarts=1, restart_on="any").submit(leave_while_others, wait)
    assert run.results(watch.DEADLINE) == [1, 1]
    assert run.attempts[0].reason == "rank 1 failed: exited with code 0 before the function returned (os._exit?)"


def end_late(how: str) -> None:
    """Rank 1 closes its group long before it is seen to have failed; the others lose their connections to it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        if how == "_exit":  # without a word
            time.sleep(0.4)
            os._exit(3)
        atexit.register(time.sleep, 1)
        sys.exit(3)
    dist.all_reduce(torch.ones(1))


@pytest.mark.long_on_executors
@pytest.mark.parametrize("how", ["exit", pytest.param("_exit", marks=pytest.mark.long_on_executors)])
def test_a_rank_that_ends_late_is_the_one_that_has_failed(make: Make, how: str) -> None:
    run = make(2, max_restarts=1).submit(end_late, how)
    with pytest.raises(TrainingError, match=r"^rank 1 on .* failed: exited with code 3") as caught:
        run.result(watch.DEADLINE)
    assert caught.value.exit_code == 3
    assert len(run.attempts) == 1


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder on a file system of its own, of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with stores.small_disk(folder, "8m"):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield folder


def test_a_full_disk_does_not_hide_the_exception(make_local: Make, small_disk: Path) -> None:
    with pytest.raises(TrainingError, match=r"failed: ValueError: the learning rate must be") as caught:
        make_local(1).run(faults.fill_then, "raise")
    assert f"The disk of {small_disk}" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(TrainingError, match=r"failed: exited with code 3. The disk of .* is full"):
        make_local(1).run(faults.fill_then, "exit")


def test_output_that_fills_the_disk_is_named(make_local: Make, small_disk: Path) -> None:
    with pytest.raises(TrainingError, match=r"failed: OSError: \[Errno 28\] No space left on device.* is full"):
        make_local(1).run(faults.fill_then, "print")


def test_a_rank_succeeds_on_a_full_disk(make_local: Make, small_disk: Path) -> None:
    assert make_local(2).submit(faults.fill_then, "return", 1000).results() == [bytes(1000)] * 2


def test_a_value_that_does_not_fit_on_the_disk_is_an_error(make_local: Make, small_disk: Path) -> None:
    text = r"value of type builtins.bytes cannot be written to .* \(No space left on device, .* free there\): make room"
    with pytest.raises(ResultError, match=text):
        make_local(1).run(faults.fill_then, "return", 9 << 20)


def test_a_run_does_not_start_on_a_full_disk(make_local: Make, small_disk: Path) -> None:
    faults.fill(str(small_disk))
    with pytest.raises(StartError, match=r"the disk of .* is full: make room there, or set TMPDIR to another folder"):
        make_local(1).run(faults.fill_then, "return")


def fork_and(then: str, go: str) -> str:
    """A child that ends after its parent has returned: its end is not the rank's."""
    child = os.fork()
    if child == 0:
        while not Path(go).exists():
            time.sleep(0.01)
        if then == "raise":
            raise ValueError("raised in a fork")
        if then == "exit":
            sys.exit("exited in a fork")
        return "of a fork"

    def outlive() -> None:
        Path(go).touch()
        os.waitpid(child, 0)

    atexit.register(outlive)
    return "of the rank"


@pytest.mark.slow
@pytest.mark.parametrize("then", ["return", "raise", pytest.param("exit", marks=pytest.mark.long)])
def test_a_fork_of_a_rank_is_not_the_rank(make_local: Make, then: str, tmp_path: Path) -> None:
    assert make_local(1).run(fork_and, then, str(tmp_path / "go")) == "of the rank"


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


def raise_frozen() -> None:
    raise Frozen(3)


def test_an_exception_that_refuses_changes_arrives(make_local: Make) -> None:
    with pytest.raises(TrainingError, match=r"Frozen: 3\n") as caught:
        make_local(1).run(raise_frozen)
    assert caught.value.__cause__ == Frozen(3)


class NeverEnds(Exception):
    """An exception whose text never comes."""

    def __str__(self) -> str:
        while True:
            time.sleep(1)


class NeverReduced(Exception):
    """An exception that is never pickled."""

    def __reduce__(self) -> Any:
        while True:
            time.sleep(1)


def raise_what_never_ends(what: str) -> None:
    from distributor.rank import result

    result.PATIENCE = 0.5
    if what == "text":
        raise NeverEnds
    raise NeverReduced("step 17")


def test_an_exception_whose_text_never_comes_ends_the_rank(make_local: Make) -> None:
    with pytest.raises(TrainingError, match=r"NeverEnds \(its text was not available after 0.5 s\)") as caught:
        make_local(1).run(raise_what_never_ends, "text")
    assert "in raise_what_never_ends" in caught.value.traceback


def test_an_exception_that_is_never_pickled_keeps_its_text(make_local: Make) -> None:
    with pytest.raises(TrainingError, match=r"failed: .*NeverReduced: step 17") as caught:
        make_local(1).run(raise_what_never_ends, "pickle")
    assert caught.value.__cause__ is None


class SlowlyPickled(Exception):
    """An exception that is being pickled when another rank ends, and a while longer."""

    def __reduce__(self) -> Any:
        folder = Path(self.args[0])
        (folder / "pickling").touch()
        with suppress(ProcessLookupError):
            while True:
                os.kill(int((folder / "1").read_text()), 0)
                time.sleep(0.01)
        time.sleep(0.5)
        return RuntimeError, ("step 17",)


def fail_together(folder: str, handled: bool) -> None:
    """Rank 0 fails first, and rank 1 ends first."""
    own, pickling = Path(folder, os.environ["RANK"]), Path(folder, "pickling")
    own.with_suffix(".new").write_text(str(os.getpid()))
    own.with_suffix(".new").replace(own)
    while not all(Path(folder, rank).exists() for rank in "01"):
        time.sleep(0.01)
    if handled:
        runtime.should_stop(0)
    if own.name == "0":
        raise SlowlyPickled(folder)
    while not pickling.exists():
        time.sleep(0.01)
    raise ValueError


@pytest.mark.slow
@pytest.mark.parametrize("handled", [False, True], ids=["SIGTERM", "SIGKILL"])
def test_a_rank_is_not_stopped_before_it_has_told_its_exception(
    make_local: Make, handled: bool, tmp_path: Path
) -> None:
    """Another one's failure stops it meanwhile: with SIGTERM, or with SIGKILL if ``should_stop`` handles that."""
    with pytest.raises(TrainingError, match=r"^rank 0 on .* failed: \S*SlowlyPickled: ") as caught:
        make_local(2).run(fail_together, str(tmp_path), handled)
    assert isinstance(caught.value.__cause__, RuntimeError)


class NeverPickled:
    """A value that is never pickled."""

    def __reduce__(self) -> Any:
        while True:
            time.sleep(1)


def return_what_never_ends() -> Any:
    from distributor.rank import result

    result.VALUE_PATIENCE = 0.5
    return NeverPickled()


def test_a_value_that_is_never_pickled_ends_the_rank(make_local: Make) -> None:
    with pytest.raises(ResultError, match=r"NeverPickled cannot be pickled \(no progress for 0.5 s\)"):
        make_local(1).run(return_what_never_ends)


@pytest.mark.spark
@pytest.mark.parametrize("mode", ["local-cluster[2,2,1024]"], indirect=True)
@pytest.mark.slow
def test_a_large_exception_arrives(make: Make) -> None:
    with pytest.raises(TrainingError, match=r"^ranks? [0-3, -]+ on .* failed: ValueError: x{100}") as caught:
        make(4).run(faults.raise_at_length, 50 << 20)
    assert "characters are left out" in str(caught.value)
    assert len(str(caught.value)) < 1 << 20


def fail_first_or_when_stopped(started: str) -> None:
    """Rank 0 fails; rank 1, whose clock is an hour behind, fails because it is told to stop."""
    if os.environ["RANK"] == "0":
        while not Path(started).exists():
            time.sleep(0.01)
        raise ValueError("the true reason")
    real = time.time
    time.time = lambda: real() - 3600

    def stopped(*_: Any) -> None:
        raise RuntimeError("told to stop")

    signal.signal(signal.SIGTERM, stopped)
    Path(started).touch()
    time.sleep(300)


@pytest.mark.slow
def test_a_clock_that_is_behind_does_not_change_which_rank_failed_first(tmp_path: Path) -> None:
    """Neither between the ranks of a node, nor between nodes."""
    for nodes in (1, 2):
        with driven(fail_first_or_when_stopped, str(tmp_path / f"{nodes}"), nodes=nodes) as driver:
            ended = {o.rank: o.failure for report in driver.result().reports for o in report.outcomes}
        assert ended[0] is not None and ended[1] is not None
        assert (ended[0].after_stop, ended[1].after_stop) == (False, True)
        assert abs(ended[1].time - time.time()) < 600


def unread(port: int) -> bool:
    """Whether something has come for a port of this machine that nobody has read (proc(5), /proc/net/tcp)."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return any(line[1].endswith(f":{port:04X}") and not line[4].endswith(":00000000") for line in lines)


@pytest.mark.slow
def test_a_failure_is_reported_while_the_store_does_not_answer(tmp_path: Path) -> None:
    """As when nodes cannot reach each other, but both reach the driver."""
    go = tmp_path / "go"
    with driven(faults.fail_after, str(go), start_timeout=600.0) as driver:
        watch.until(lambda: all(Path(f"{go}.{rank}").exists() for rank in range(2)))
        placement = driver.heard(messages.Hello)[0].placement  # as text
        port = json.loads(placement)[0]["port"]
        launchers = [child for agent in driver.agents() for child in agent.children() if watch.is_launcher(child)]
        (store,) = [result for result in launchers if port in (line.laddr.port for line in result.net_connections())]
        store.suspend()
        try:
            watch.until(lambda: unread(port))
            go.touch()
            watch.until(lambda: driver.heard(messages.Failed))
            assert store.status() == psutil.STATUS_STOPPED
        finally:
            store.resume()
        failure = driver.heard(messages.Failed)[0].failure
    assert failure is not None
    assert failure.message == "ValueError: while the nodes were apart"
