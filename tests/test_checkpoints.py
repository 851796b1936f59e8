"""Checkpoints of real runs: a training that was ended by any kill goes on from the last committed step, bit by bit."""

from __future__ import annotations

import errno
import inspect
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpointed
import pytest
import stores
import torch
import victims
import watch
from sessions import Make, Sessions

import distributor
from distributor import (
    Checkpoints,
    Distributor,
    NodeLostError,
    Run,
    StartError,
    TorchDistributor,
    TrainingError,
    runtime,
)
from distributor.channel.server import ChannelServer
from distributor.checkpoint import loading
from distributor.launch import DeepSpeed

STEPS = 6

ZERO_2 = {
    "train_micro_batch_size_per_gpu": 6,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The weights after an undisturbed training of two ranks, under DDP or FSDP2."""

    @cache
    def train(split: bool, steps: int = STEPS) -> str:
        made = TorchDistributor(2, True, False, checkpoints=tmp_path_factory.mktemp("undisturbed"))
        begun, weights, _ = made.run(checkpointed.train_digits, steps, split=split)
        assert begun is None
        return weights

    return train


@pytest.mark.long_on_executors
@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.long)], ids=["DDP", "FSDP2"])
@pytest.mark.slow
def test_a_killed_training_goes_on_bit_by_bit(
    make: Make, undisturbed: Callable[..., str], split: bool, tmp_path: Path
) -> None:
    """Weights, optimizer, scheduler, random states of each rank and a plain value are as if nothing had happened."""
    distributor = make(2, checkpoints=Checkpoints(str(tmp_path / "runs"), keep=2))
    killed = str(tmp_path / "killed")
    with pytest.raises(TrainingError, match="killed by SIGKILL"):
        distributor.run(checkpointed.train_digits, STEPS, killed, split)
    begun, weights, seen = distributor.run(checkpointed.train_digits, STEPS, killed, split)
    assert begun is not None and STEPS // 2 - 1 <= begun <= STEPS // 2
    assert weights == undisturbed(split)
    assert seen == STEPS * 16
    assert checkpointed.committed(tmp_path / "runs") == [STEPS, STEPS - 1]
    assert not [name for name in os.listdir(tmp_path / "runs") if name.startswith((".", "tmp"))]


@pytest.mark.slow
@pytest.mark.long_on_executors
@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.long), True], ids=["DDP", "FSDP2"])
def test_ranks_that_start_again_go_on_from_memory(
    make: Make, undisturbed: Callable[..., str], split: bool, tmp_path: Path
) -> None:
    """The place takes nothing, so memory is all that survives; at most one step is lost, and in the end it is gone."""
    kept = Checkpoints(str(tmp_path / "runs"), memory=True)
    run = make(2, checkpoints=kept, max_restarts=1).submit(
        checkpointed.train_digits, STEPS, str(tmp_path / "killed"), split, down=True
    )
    begun, weights, seen = run.result(watch.DEADLINE)
    assert begun is not None and STEPS // 2 - 1 <= begun <= STEPS // 2
    assert weights == undisturbed(split)
    assert seen == STEPS * 16
    assert checkpointed.committed(tmp_path / "runs") == []
    assert not list(Path("/dev/shm").glob(f"*{run.id}*"))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "victim"),
    [
        pytest.param(False, "executor", id="DDP-executor", marks=pytest.mark.long),
        pytest.param(True, "agent", id="FSDP2-agent", marks=pytest.mark.long),
        pytest.param(False, "agent", id="DDP-agent", marks=pytest.mark.long),
        pytest.param(True, "executor", id="FSDP2-executor", marks=pytest.mark.long),
    ],
)
def test_a_lost_node_goes_on_from_the_copy_that_another_keeps(
    sessions: Sessions, undisturbed: Callable[..., str], split: bool, victim: str, tmp_path: Path
) -> None:
    """The place takes nothing, so the copies are all that survives of the node."""
    sessions.get("local-cluster[2,1,1024]")
    kept = Checkpoints(str(tmp_path / "runs"), memory=True, replicate=True)
    distributor = TorchDistributor(2, False, False, checkpoints=kept, max_restarts=1, grace_period=1.0)
    run = distributor.submit(checkpointed.train_digits, 2 * STEPS, None, split, down=True, pause=0.2)
    watch.until(lambda: run.metrics and run.metrics[-1].step >= STEPS // 2)
    victims.KILLS[victim][0](run).kill()
    begun, weights, seen = run.result(watch.DEADLINE)
    lost = run.attempts[0].step
    assert lost is not None and begun is not None and begun >= lost - 1
    assert weights == undisturbed(split, 2 * STEPS)
    assert seen == 2 * STEPS * 16
    assert checkpointed.committed(tmp_path / "runs") == []
    watch.gone(run.id)
    assert not list(Path("/dev/shm").glob(f"*{run.id}*"))


@pytest.mark.spark
@pytest.mark.long
def test_without_a_channel_a_new_job_finds_no_copies(
    sessions: Sessions, unreachable: None, undisturbed: Callable[..., str], tmp_path: Path
) -> None:
    sessions.get("local-cluster[2,1,1024]")
    kept = Checkpoints(str(tmp_path / "runs"), memory=True, replicate=True)
    run = TorchDistributor(2, False, False, checkpoints=kept, max_restarts=1).submit(
        checkpointed.train_digits, STEPS, str(tmp_path / "killed"), down=True
    )
    begun, weights, _ = run.result(2 * watch.DEADLINE)
    assert (begun, weights) == (None, undisturbed(False))
    assert [each.number for each in run.attempts] == [0, 1]
    assert not list(Path("/dev/shm").glob(f"*{run.id}*"))


@pytest.mark.slow
def test_training_goes_on_while_a_copy_is_sent_and_the_next_save_waits(make_local: Make, tmp_path: Path) -> None:
    kept = Checkpoints(str(tmp_path / "runs"), memory=True, replicate=True)
    assert make_local(1, checkpoints=kept).run(save_while_a_copy_is_sent) == (0, 1)


def save_while_a_copy_is_sent() -> tuple[int, int]:
    """Saves twice; how many copies had been sent after each call."""
    import threading

    import torch

    from distributor import runtime
    from distributor.checkpoint.memory.memory import Memory

    may_go_on, sent = threading.Event(), list[str]()

    def replicate(_: Memory, checkpoint: str, *rest: object) -> None:
        assert may_go_on.wait(watch.DEADLINE)
        sent.append(checkpoint)

    Memory.replicate = replicate  # type: ignore[assignment, method-assign]
    state = {"model": torch.nn.Linear(2, 1)}
    runtime.save_checkpoint(state, 1)
    after_first = len(sent)
    threading.Timer(0.2, may_go_on.set).start()
    runtime.save_checkpoint(state, 2)
    return after_first, min(1, len(sent))


@pytest.mark.long
def test_one_node_keeps_no_copies_and_says_so(
    make_local: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = Checkpoints(str(tmp_path / "runs"), memory=True, replicate=True)
    run = make_local(2, checkpoints=kept, max_restarts=1).submit(
        checkpointed.train_digits, STEPS, str(tmp_path / "killed"), down=True
    )
    begun, _, seen = run.result(watch.DEADLINE)
    assert begun is not None and seen == STEPS * 16
    assert "Checkpoints(replicate=True): no copy is kept: this run has only one node" in capfd.readouterr().err


@pytest.mark.long
def test_a_state_in_memory_that_one_rank_cannot_read_is_passed_over_by_all(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The place has the step before."""
    kept = Checkpoints(str(tmp_path / "runs"), memory=True)
    run = make_local(2, checkpoints=kept, max_restarts=1).submit(lose_memory)
    assert run.results(watch.DEADLINE) == [1, 1]
    assert "load_checkpoint loads step-1-" in caplog.text
    assert caplog.text.count("and passes over the state of step 2 in memory (it is gone (rank 1))") == 1


def lose_memory() -> int | None:
    """Commits a first step, keeps a second one in memory only, and is killed; the step that is found then."""
    import torch

    from distributor import runtime
    from distributor.checkpoint.memory.memory import Memory

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    state = {"model": torch.nn.Linear(2, 1)}
    if runtime.attempt() > 0:
        if runtime.rank() == 1:

            def read(*_: object) -> Any:
                raise OSError("it is gone")

            Memory.read = read  # type: ignore[method-assign]
        return runtime.load_checkpoint(state)
    runtime.save_checkpoint(state, 1, wait=True)
    checkpointed.take_nothing()
    with suppress(OSError):
        runtime.save_checkpoint(state, 2, wait=True)
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.slow
def test_what_is_newer_in_the_place_is_loaded_from_there(make_local: Make, tmp_path: Path) -> None:
    """Shared memory has no room for the second state, which the place has."""
    kept = Checkpoints(str(tmp_path / "runs"), memory=True)
    run = make_local(2, checkpoints=kept, max_restarts=1).submit(outgrow)
    assert run.results(watch.DEADLINE) == [2.0, 2.0]


def outgrow() -> float:
    """Saves a small state, then one that memory does not take, and is killed; the value that it finds."""
    import torch

    from distributor import runtime
    from distributor.machine import state_folders

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    if runtime.attempt() > 0:
        model.register_buffer("grows", torch.zeros(2))
        runtime.load_checkpoint({"model": model})
        return float(model.weight[0, 0].detach())
    for step in (1, 2):
        torch.nn.init.constant_(model.weight, step)
        model.register_buffer("grows", torch.zeros(step))
        if step == 2:
            create = state_folders.create_file
            state_folders.create_file = lambda path, size, limit: create(path, size, 0)
        runtime.save_checkpoint({"model": model}, step, wait=True)
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.long
def test_an_agent_that_is_killed_leaves_no_memory(make_local: Make, tmp_path: Path) -> None:
    kept = Checkpoints(str(tmp_path / "runs"), memory=True)
    run = make_local(2, checkpoints=kept, max_restarts=1).submit(
        checkpointed.save_until_killed, str(tmp_path / "ready")
    )
    watch.until((tmp_path / "ready").exists)
    assert list(Path("/dev/shm").glob(f"*{run.id}*/*.record"))
    victims.part(run, "agent").kill()
    watch.until(lambda: len(run.attempts) == 1)
    (tmp_path / "ready").unlink()
    watch.until((tmp_path / "ready").exists)  # the new job has memory of its own
    victims.part(run, "agent").kill()
    with pytest.raises(NodeLostError):
        run.result(watch.DEADLINE)
    watch.until(lambda: not list(Path("/dev/shm").glob(f"*{run.id}*")))


@pytest.mark.long
def test_a_training_goes_on_from_a_url(make_local: Make, undisturbed: Callable[..., str], tmp_path: Path) -> None:
    distributor = make_local(2, checkpoints=f"file://{tmp_path / 'runs'}")
    killed = str(tmp_path / "killed")
    with pytest.raises(TrainingError, match="killed by SIGKILL"):
        distributor.run(checkpointed.train_digits, STEPS, killed)
    begun, weights, _ = distributor.run(checkpointed.train_digits, STEPS, killed)
    assert begun is not None
    assert weights == undisturbed(False)


def save_beside_training_and_in_turn() -> tuple[list[int], int]:
    """Return by how much the priority is lower where each save writes, and where training runs."""
    from distributor.checkpoint import plans

    state, write, found = {"model": torch.nn.Linear(1, 1)}, plans.write, list[int]()

    def noted(*args: Any) -> Any:
        found.append(os.nice(0) - before)
        return write(*args)

    plans.write = noted
    before = os.nice(0)
    runtime.save_checkpoint(state, 1)
    runtime.save_checkpoint(state, 2, wait=True)
    return found, os.nice(0) - before


def test_a_save_beside_training_leaves_training_its_priority(make_local: Make, tmp_path: Path) -> None:
    assert make_local(1, checkpoints=tmp_path).run(save_beside_training_and_in_turn) == ([15, 0], 0)


def save_a_layer() -> None:
    runtime.save_checkpoint({"model": torch.nn.Linear(1, 1)}, 1, wait=True)


def test_what_was_downloaded_for_one_load_outside_a_run_is_removed(make_local: Make, tmp_path: Path) -> None:
    place = f"file://{tmp_path / 'runs'}"
    make_local(1, checkpoints=place).run(save_a_layer)
    before = set(os.listdir(tempfile.gettempdir()))
    path = loading.load_module(torch.nn.Linear(1, 1), Checkpoints(place))
    loading.load_committed({"model": torch.nn.Linear(1, 1)}, place, os.path.basename(path))
    assert set(os.listdir(tempfile.gettempdir())) <= before


def save_at_the_end() -> None:
    """Its last save reaches the store once the code has ended, and needs an executor there, as lookups of names do."""
    from concurrent import futures

    from distributor.machine.storage import Url

    put = Url.put

    def put_late(self: Url, source: str, name: str) -> None:
        watch.until(lambda: futures.thread._shutdown or _main_thread_is_in("finish"))
        with futures.ThreadPoolExecutor() as pool:
            pool.submit(put, self, source, name).result()

    Url.put = put_late  # type: ignore[method-assign]
    runtime.save_checkpoint({"value": 1}, 1)


def _main_thread_is_in(function: str) -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return any(each.f_code.co_name == function for each, _ in traceback.walk_stack(frame))


def test_the_last_save_may_use_executors_after_the_code_has_ended(make_local: Make, tmp_path: Path) -> None:
    make_local(1, checkpoints=f"file://{tmp_path}").run(save_at_the_end)
    assert checkpointed.committed(tmp_path) == [1]


@pytest.mark.long
@pytest.mark.parametrize("name", ["DCP", "Accelerate", "DeepSpeed"])
def test_libraries_that_write_their_own_files(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A training in two runs ends with the bits of one in one run: by the lines of docs/checkpoints.md."""
    options: dict[str, Any] = {}
    if name == "DeepSpeed":
        request.getfixturevalue("deepspeed")
        options = {"launch": DeepSpeed(ZERO_2)}
    else:
        pytest.importorskip("accelerate")

    def run(folder: str, steps: int) -> Any:
        distributor = Distributor(2, True, False, checkpoints=tmp_path / folder, **options)
        return distributor.run(checkpointed.train_with, name, steps)

    _, whole = run("whole", 4)
    assert run("parts", 2)[0] == 0
    assert run("parts", 4) == (2, whole)


@pytest.mark.long
@pytest.mark.timeout(6 * watch.DEADLINE)
@pytest.mark.parametrize("kills", [3, 20])
@pytest.mark.parametrize("name", ["trainer", "lightning", "deepspeed"])
def test_frameworks_go_on_after_kills(name: str, kills: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Ranks are killed at random times while they save. The lines are those of docs/checkpoints.md."""
    package = {"trainer": "transformers.trainer", "lightning": "pytorch_lightning", "deepspeed": "deepspeed"}[name]
    pytest.importorskip(package)
    options: dict[str, Any] = {"preload": [package]}
    if name == "deepspeed":
        request.getfixturevalue("deepspeed")
        options = {"launch": DeepSpeed(ZERO_2)}
    training = getattr(checkpointed, f"train_with_{name}")

    def run(folder: str, killed: int) -> Any:
        kept = tmp_path / folder
        distributor = Distributor(
            2, True, False, checkpoints=kept / "kept", max_restarts=killed, grace_period=1.0, **options
        )
        return distributor.submit(training, str(kept / "own"), 3 * kills, killed).result(5 * watch.DEADLINE)

    _, whole = run("whole", 0)
    begun, weights = run("killed", kills)
    assert begun > 0
    assert weights == whole


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_training_goes_on_at_another_width(make_local: Make, before: int, after: int, tmp_path: Path) -> None:
    """FSDP2's parts are divided anew; further ranks get rank 0's values."""
    _, saved, _ = make_local(before, checkpoints=tmp_path).run(checkpointed.train_digits, STEPS, None, True)
    begun, weights, seen = make_local(after, checkpoints=tmp_path).run(checkpointed.train_digits, STEPS, None, True)
    assert (begun, weights, seen) == (STEPS, saved, STEPS * 16)


@pytest.mark.long
def test_a_ddp_checkpoint_loads_into_split_models(make_local: Make, tmp_path: Path) -> None:
    def save() -> str:
        import torch

        from distributor import runtime

        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 4))
        runtime.save_checkpoint({"model": model}, 1, wait=True)
        return checkpointed.weights(model.module)

    def load() -> str:
        import torch
        from torch.distributed.fsdp import fully_shard

        from distributor import runtime

        torch.distributed.init_process_group("gloo")
        model = fully_shard(torch.nn.Linear(6, 4))
        assert runtime.load_checkpoint({"model": model}) == 1
        return checkpointed.weights(model)

    saved = make_local(2, checkpoints=tmp_path).run(save)
    assert make_local(2, checkpoints=tmp_path).run(load) == saved


@pytest.mark.slow
@pytest.mark.long_on_executors
@pytest.mark.parametrize("is_url", [False, True], ids=["folder", "URL"])
def test_files_of_all_ranks_form_one_checkpoint(make: Make, is_url: bool, tmp_path: Path) -> None:
    """Equal files of one name count once. The folder holds all files under their names, and nothing else is left."""
    names = {0: "part/rank-0", 1: "rank-1"}
    distributor = make(2, checkpoints=f"file://{tmp_path}" if is_url else tmp_path)
    found = [(7, {"part/rank-0": "rank 0", "rank-1": "rank 1"})] * 2
    assert [*distributor.submit(checkpointed.write_files, 7, names).results()] == found
    assert distributor.run(checkpointed.write_files, 8, {0: "same", 1: "same"}) == (8, {"same": "same"})
    assert checkpointed.committed(tmp_path) == [8, 7]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        *("rank-0", "rank-1", "same", "manifest.json", "index-0.json", "index-1.json", "lease-0.json", "lease-1.json")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({0: "file", 1: "file"}, r"checkpoint_folder\(step=7\): ranks 0-1 wrote different bytes to 'file': give each"),
        ({0: "file", 1: "file/1"}, r"'file' is a file of rank 0 and a folder of rank 1: rename one of them"),
        ({0: "file", 1: "manifest.json"}, r"rank 1 .*: distributor itself uses the name 'manifest.json' in the folder"),
    ],
)
def test_files_that_exclude_each_other(make_local: Make, names: dict[int, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=message):
        make_local(2, checkpoints=tmp_path).run(checkpointed.write_files, 7, names)
    assert checkpointed.committed(tmp_path) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_in_the_block_commits_nothing(make_local: Make, failing: int, tmp_path: Path) -> None:
    def write(failing: int) -> None:
        try:
            checkpointed.write_files(7, {0: "rank-0", 1: "rank-1"}, failing)
        except RuntimeError as error:
            assert f"rank {failing} failed in the with block" in str(error)

    with pytest.raises(TrainingError, match=f"rank {failing} .*failed: ValueError: boom"):
        make_local(2, checkpoints=tmp_path).run(write, failing)
    assert checkpointed.committed(tmp_path) == []


@pytest.mark.long_on_executors
def test_callbacks_are_told_of_checkpoints(make: Make, tmp_path: Path) -> None:
    """Of each one, the last included, which is committed after the function has returned."""
    told = checkpointed.Told()
    make(2, checkpoints=Checkpoints(str(tmp_path), keep=None), callbacks=[told]).run(checkpointed.save_steps, 3)
    assert [step for step, _ in told.checkpoints] == [1, 2, 3]
    assert all(Path(path, "manifest.json").exists() for _, path in told.checkpoints)


def refuse(*_: Any) -> Any:
    raise OSError("no port is free")


@pytest.mark.spark
@pytest.mark.slow
def test_without_a_channel(
    two_executors: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks need each other and the place only. Callbacks and the user hear of checkpoints at the end."""
    monkeypatch.setattr(ChannelServer, "listen", refuse)
    told = checkpointed.Told()
    distributor = TorchDistributor(2, False, False, checkpoints=tmp_path, callbacks=[told])
    distributor.run(checkpointed.save_steps, 2)
    assert [step for step, _ in told.checkpoints] == [1, 2]
    assert distributor.submit(checkpointed.load_value).results() == [2, 2]
    (path,) = tmp_path.glob("step-2-*/manifest.json")
    stores.unreadable(path)
    assert distributor.submit(checkpointed.load_value).results() == [1, 1]
    assert len(re.findall(r"rank 0: load_checkpoint loads step-1-\S+ and passes over step-2-", caplog.text)) == 1


def call_differently() -> None:
    from distributor import runtime

    if runtime.rank() == 0:
        runtime.save_checkpoint({"value": 1}, 1, wait=True)
    else:
        with runtime.checkpoint_folder(1):
            pass


def test_ranks_that_make_different_calls_are_told(make_local: Make, tmp_path: Path) -> None:
    told = r"rank 0 calls save_checkpoint\(step=1\), but rank 1 calls checkpoint_folder\(step=1\): every rank must"
    with pytest.raises(TrainingError, match=told):
        make_local(2, checkpoints=tmp_path).run(call_differently)


def save_own_models() -> None:
    import torch

    from distributor import runtime

    torch.manual_seed(runtime.rank())
    runtime.save_checkpoint({"model": torch.nn.Linear(4, 4)}, 1, wait=True)


def save_best() -> list[int]:
    """Reports a better loss after each save than the one that belongs to it."""
    import torch

    from distributor import runtime
    from distributor.checkpoint import saving

    for step, loss in ((1, 0.1), (2, 0.9), (3, 0.5)):
        runtime.report(step=step, loss=loss)
        runtime.save_checkpoint({"value": torch.zeros(1 << 20)}, step)
        runtime.report(step=step, loss=0.0)
        saving.current("").finish()
    best, last = runtime.best_checkpoint(), runtime.latest_checkpoint()
    assert best is not None and last is not None
    return [best.step, last.step, int(10 * best.metrics["loss"])]


def test_the_best_checkpoint_is_that_of_the_reports_before_it(make_local: Make, tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=1, best=("loss", "min"))
    assert make_local(2, checkpoints=checkpoints).submit(save_best).results() == [[1, 3, 1]] * 2
    assert checkpointed.committed(tmp_path) == [3, 1]


def break_one_rank(what: str) -> int | None:
    """Rank 1 cannot write its part; the others are told at once."""
    import torch

    from distributor import runtime
    from distributor.checkpoint import plans, shards

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("PytorchStreamWriter failed")

    runtime.save_checkpoint({"model": torch.nn.Flatten(), "value": 1}, 1, wait=True)
    if runtime.rank() == 1:
        plans.write = shards.found_in = fail
    if what == "save_checkpoint":
        with pytest.raises(OSError, match=r"nothing was saved: RuntimeError: PytorchStreamWriter failed \(rank 1\)"):
            runtime.save_checkpoint({"model": torch.nn.Flatten(), "value": 2}, 2, wait=True)
    else:
        with runtime.checkpoint_folder(2) as folder:
            (folder / str(runtime.rank())).touch()
    return runtime.load_checkpoint({"value": 0})


@pytest.mark.parametrize("what", ["save_checkpoint", pytest.param("checkpoint_folder", marks=pytest.mark.long)])
@pytest.mark.long
def test_a_rank_that_cannot_write_holds_up_nobody(make_local: Make, what: str, tmp_path: Path) -> None:
    run = make_local(2, checkpoints=tmp_path, start_method="spawn").submit(break_one_rank, what)
    assert run.results(watch.DEADLINE) == [1, 1]


def interrupt_one_rank(wait: bool, error: str) -> tuple[str, int | None]:
    """Rank 1 fails in the second save, and goes on. What a rank catches, and the loaded step."""
    import threading

    from distributor import runtime
    from distributor.checkpoint import saving

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    caught, copy = "", saving._Kept.copy
    for step in (1, 2, 3):
        fails = runtime.rank() == 1 and step == 2
        saving._Kept.copy = fail if fails and error == "MemoryError" else copy  # type: ignore[method-assign]
        value = threading.Lock() if fails and error == "TypeError" else step
        try:
            runtime.save_checkpoint({"value": value}, step, wait=wait)
        except (MemoryError, RuntimeError, TypeError) as raised:
            assert step == 2
            caught = f"{type(raised).__name__}: {raised}"
    return caught, runtime.load_checkpoint({"value": 0})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wait", "error"), [(True, "MemoryError"), (False, "MemoryError"), (False, "TypeError: cannot pickle")]
)
def test_a_rank_that_fails_in_a_save_and_goes_on_holds_up_nobody(
    make_local: Make, wait: bool, error: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = f"save_checkpoint(step=2): rank 1 failed in the call ({error}"
    run = make_local(2, checkpoints=tmp_path).submit(interrupt_one_rank, wait, error.partition(":")[0])
    (caught, loaded), (others, loaded_by_other) = run.results(watch.DEADLINE)
    assert (loaded, loaded_by_other) == (3, 3)
    assert others.startswith(error)
    assert caught.startswith(f"RuntimeError: {told}" if wait else "")
    if not wait:
        assert caught == ""
        assert f"nothing was saved, and training goes on: {told}" in capfd.readouterr().err


def under_torchrun(folder: str) -> None:
    """A rank of plain torchrun, which has no run of ours around it."""
    import torch.distributed as dist

    from distributor import runtime

    assert runtime.latest_checkpoint() is None
    dist.init_process_group("gloo")
    runtime.save_checkpoint({"value": runtime.rank()}, 5)
    state = {"value": None}
    assert runtime.load_checkpoint(state) == 5
    assert state["value"] == runtime.rank()
    order: list[int] = []
    for first in (runtime.rank0_first, runtime.local_rank0_first):
        with first():
            order.append(runtime.rank())
    assert order == [runtime.rank()] * 2
    dist.destroy_process_group()
    runtime.save_checkpoint({"value": 6}, 6)


@pytest.mark.long
def test_the_same_code_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lines = inspect.getsource(under_torchrun)
    script.write_text(f"from __future__ import annotations\n\n{lines}\nunder_torchrun('')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    told = {**os.environ, "DISTRIBUTOR_CHECKPOINTS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    for name in [name for name in told if name.startswith(("TORCHELASTIC", "RANK", "WORLD_SIZE", "MASTER"))]:
        del told[name]
    told["PYTHONPATH"] = os.pathsep.join([str(Path(distributor.__file__).parents[1]), told.get("PYTHONPATH", "")])
    subprocess.run(command, env=told, check=True, timeout=2 * watch.DEADLINE)
    assert checkpointed.committed(tmp_path / "runs") == [6, 5]


def test_models_that_differ_between_ranks_are_not_saved_as_one(make_local: Make, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the parameters of 'model' differ between ranks"):
        make_local(2, checkpoints=tmp_path).run(save_own_models)


def load_into(kind: str) -> None:
    import torch

    from distributor import runtime

    model = torch.nn.Linear(4, 4)
    if kind == "size":
        runtime.load_checkpoint({"model": torch.nn.Linear(4, 5)})
    elif kind == "name":
        runtime.load_checkpoint({"net": model})
    elif kind == "parameters":
        runtime.load_checkpoint({"model": model, "optimizer": torch.optim.SGD([model.weight], lr=0.1)})
    elif kind == "optimizer":
        runtime.load_checkpoint({"model": model, "adam": torch.optim.Adam(model.parameters())})
    elif kind == "step":
        runtime.save_checkpoint({}, -1)
    elif kind == "state":
        runtime.save_checkpoint([model], 1)  # type: ignore[arg-type]
    elif kind == "entry":
        runtime.save_checkpoint({"#x": 1}, 1)
    elif kind == "class":
        runtime.load_checkpoint({"model": model, "optimizer": torch.optim.Adam(model.parameters())})
    elif kind == "refused":
        runtime.save_checkpoint({"value": checkpointed.digits}, 4)
    elif kind == "code":
        runtime.save_checkpoint({"value": checkpointed.digits}, 4, wait=True, weights_only=False)
        state: dict[str, Any] = {"value": 0}
        assert runtime.load_checkpoint(state, weights_only=False) == 4
        assert callable(state["value"])
        runtime.load_checkpoint(state)


def refusals(kinds: list[str]) -> dict[str, str]:
    """What each of these says."""
    import torch

    from distributor import DistributorError, runtime

    model = torch.nn.Linear(4, 4)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    runtime.save_checkpoint(state, 3, wait=True)
    told = {}
    for kind in kinds:
        try:
            load_into(kind)
        except DistributorError as error:
            told[kind] = str(error)
        assert kind == "code" or runtime.load_checkpoint(state) == 3
    return told


@pytest.mark.slow
def test_what_cannot_be_saved_or_loaded_is_an_error(make_local: Make, tmp_path: Path) -> None:
    expected = {
        "size": r"'model.weight', 'model.bias' had another size .*: 'model.weight' had \(4, 4\), and has \(5, 4\) now",
        "name": "the checkpoint has no 'net.weight', 'net.bias': it was saved from another model",
        "parameters": "the optimizer 'optimizer' had other parameters when the checkpoint was saved",
        "optimizer": "the checkpoint has no optimizer 'adam'",
        "class": "'optimizer' was saved with dampening, momentum, nesterov, in place of which Adam has amsgrad, betas",
        "refused": "load_checkpoint would refuse this state, .*pass weights_only=False to both functions. Torch says:",
        "step": "save_checkpoint: step must be a whole number of at least 0, not -1",
        "state": "save_checkpoint: state must be a dict such as .*, not list",
        "entry": "names of entries must be strings without a leading #, not '#x'",
        "code": "the checkpoint holds objects whose loading may run code. If you trust its origin, pass",
    }
    told = make_local(1, checkpoints=tmp_path).run(refusals, list(expected))
    for kind, message in expected.items():
        assert re.search(message, told[kind]), kind


def test_a_run_without_a_place_says_so(make_local: Make) -> None:
    with pytest.raises(TrainingError, match=r"this run has no place for checkpoints: pass Distributor\(checkpoints="):
        make_local(1).run(checkpointed.write_files, 1, {0: "x0"})


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which one is loaded in its place, and why, is told once."""

    def save(step: int) -> int | None:
        from distributor import runtime

        runtime.save_checkpoint({"value": step}, step, wait=True)
        return runtime.load_checkpoint({"value": 0})

    distributor = make_local(2, checkpoints=tmp_path)
    for step in (1, 2):
        assert distributor.run(save, step) == step
    (path,) = tmp_path.glob("step-2-*/objects-1.pt")
    data = path.read_bytes()

    def load() -> int | None:
        from distributor import runtime

        return runtime.load_checkpoint({"value": 0})

    for damaged, why in (
        (data[:-1] + bytes([data[-1] ^ 1]), "has other bytes than were saved \\(rank .\\)"),
        (data[:-1], f"has {len(data) - 1} bytes instead of {len(data)}"),
        (None, "is missing"),
    ):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        caplog.clear()
        assert distributor.submit(load).results() == [1, 1]
        told = f"rank 0: load_checkpoint loads step-1-.* and passes over {path.parent.name} \\(objects-1.pt {why}\\)"
        assert len(re.findall(told, caplog.text)) == 1


@pytest.mark.long
def test_files_that_cannot_be_read_cost_their_own_checkpoints(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's user is told, even if no lines of ranks are shown."""
    distributor = make_local(2, checkpoints=Checkpoints(str(tmp_path), keep=None), logs="none")
    distributor.run(checkpointed.save_steps, 4)
    for step in (1, 4):
        (path,) = tmp_path.glob(f"step-{step}-*/manifest.json")
        stores.unreadable(path)
    (path,) = tmp_path.glob("step-3-*/manifest.json")
    for folder in (path, tmp_path / "index-1.json"):
        folder.unlink()
        folder.mkdir()
    assert distributor.submit(checkpointed.load_value).results() == [2, 2]
    (told,) = [record.getMessage() for record in caplog.records if "passes over" in record.getMessage()]
    assert re.search(
        r"^run .*: rank 0: load_checkpoint loads step-2-\S+ and passes over index-1.json \(.* a direc", told
    )
    assert len(re.findall(r"step-[14]-\S+ \(manifest.json cannot be read: \[Errno 5\] Input/output error", told)) == 2
    assert len(re.findall(r"step-3-\S+ \(manifest.json cannot be read: \[Errno 21\] Is a directory", told)) == 1
    distributor.run(checkpointed.save_steps, 1)
    assert distributor.submit(checkpointed.load_value).results() == [1, 1]
    assert len(list(tmp_path.glob("step-*"))) == 5


def fail_in_loads() -> list[str]:
    """One rank fails in each of several loads, and catches the error, as the others do. What each of them says."""
    from distributor import runtime
    from distributor.checkpoint import loading
    from distributor.machine.storage import Folder

    class Fails:
        def load_state_dict(self, _: Any) -> None:
            raise ValueError("boom")

        def state_dict(self) -> dict[str, Any]:
            return {"value": 1}

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    found, real = list[str](), (Folder.folders, loading._Loading.read)
    runtime.save_checkpoint({"value": Fails()}, 1, wait=True)
    for rank, kind in ((0, "list"), (1, "type"), (1, "restore"), (0, "restore"), (1, "read"), (1, "interrupt")):
        fails = runtime.rank() == rank
        state: Any = {"value": Fails() if fails and kind == "restore" else 0}
        if fails and kind == "list":
            Folder.folders = fail  # type: ignore[method-assign]
        elif fails and kind == "type":
            state = ["value"]
        elif fails and kind == "read":
            loading._Loading.read = fail  # type: ignore[method-assign]
        elif fails and kind == "interrupt":
            state = Interrupted()
        try:
            runtime.load_checkpoint(state)
        except (Exception, KeyboardInterrupt) as error:
            found.append(f"{type(error).__name__}: {error}")
        Folder.folders, loading._Loading.read = real  # type: ignore[method-assign]
        assert runtime.load_checkpoint({"value": 0}) == 1
    return found


class Interrupted(dict[str, Any]):
    """A state whose user presses Ctrl-C."""

    def items(self) -> Any:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_load_that_fails_in_one_rank_fails_in_all(make_local: Make, tmp_path: Path) -> None:
    """Each of them with that rank's reason, and the next load is in step."""
    failed = [*make_local(3, checkpoints=tmp_path).submit(fail_in_loads).results(watch.DEADLINE)]
    told = [
        (0, r"OSError: \[Errno 5\] Input/output error"),
        (1, "(distributor.errors.)?ConfigurationError: load_checkpoint: state must be a dict such as .*, not list"),
        (1, "ValueError: boom"),
        (0, "ValueError: boom"),
        (0, r"OSError: no checkpoint in .* can be loaded: step-1-\S+ \(\[Errno 5\] Input/output error \(rank 1\)\)"),
        (1, "KeyboardInterrupt"),
    ]
    for number, (failing, why) in enumerate(told):
        for rank, own in enumerate(failed):
            text = f"RuntimeError: load_checkpoint: rank {failing} failed in the call \\({why}\\); the exception raised"
            assert re.match(why if rank == failing else text, own[number])


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("call", ["module", "value", pytest.param("checkpoint_folder", marks=pytest.mark.long)])
def test_a_full_disk_ends_no_training(make_local: Make, call: str, tmp_path: Path) -> None:
    """What was saved before stays, and the next save that fits is committed."""

    def train(call: str, folder: str) -> list[int | None]:
        import torch

        from distributor import runtime

        found = []
        for step, size in ((1, 1 << 18), (2, 1 << 24), (3, 1 << 18)):
            if call != "checkpoint_folder":
                value = torch.nn.ParameterList([torch.zeros(size // 4)]) if call == "module" else torch.zeros(size // 4)
                full = rf"nothing was saved: the disk of {folder} is full: this rank has to write 16(.0)? MiB"
                with pytest.raises(OSError, match=full) if step == 2 else nullcontext():
                    saved = runtime.save_checkpoint({"value": value}, step, wait=True)
                    assert (saved.step, saved.path.parent) == (step, Path(folder))
            else:
                try:
                    with runtime.checkpoint_folder(step) as path:
                        (path / f"{runtime.rank()}.bin").write_bytes(bytes(size))
                except (OSError, RuntimeError):
                    assert step == 2
            last = runtime.latest_checkpoint()
            found.append(last.step if last is not None else None)
        return found

    place = tmp_path / "small"
    place.mkdir()
    with stores.small_disk(place, "4m"):
        results = make_local(2, checkpoints=place).submit(train, call, str(place)).results()
        assert results == [[1, 1, 3]] * 2
        assert checkpointed.committed(place) == [3, 1]
        assert len([name for name in os.listdir(place) if name.startswith("step-")]) == 2


def fail_in_the_last_save() -> int | None:
    """Where the run begins; its second save fails in its thread."""
    from distributor import runtime
    from distributor.checkpoint import shards

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, "the disk is broken")

    begun = runtime.load_checkpoint({"value": 0})
    runtime.save_checkpoint({"value": 1}, 1)
    runtime.latest_checkpoint()
    shards.MeasuredFile = fail  # type: ignore[assignment, misc]
    runtime.save_checkpoint({"value": 2}, 2)
    return begun


@pytest.mark.slow
def test_a_run_says_where_it_begins_and_whether_its_last_save_failed(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = make_local(2, checkpoints=tmp_path).submit(fail_in_the_last_save)
    assert first.results(watch.DEADLINE) == [None, None]
    assert first.resumed_from is None
    assert f"run {first.id}: no checkpoint in {tmp_path}: begins at step 0" in caplog.text
    left = rf"the last save failed, at step 2, so the run leaves the checkpoint of step 1, {tmp_path}/step-1-\S+, as"
    assert re.search(rf"run {first.id}: {left} its last one: .*the disk is broken \(rank 0", caplog.text)
    run = make_local(2, checkpoints=tmp_path).submit(fail_in_the_last_save)
    assert run.results(watch.DEADLINE) == [1, 1]
    assert run.resumed_from is not None
    assert (run.resumed_from.step, run.resumed_from.attempt) == (1, 0)
    assert re.search(
        rf"run {run.id}: continues from step 1 of {tmp_path}/step-1-\S+, saved at \d{{4}}-\d\d-\d\d \d\d:", caplog.text
    )


def save_without_room_for_files() -> list[int | None]:
    """Rank 1's node has no room for the files that it would upload in the first save."""
    import torch

    from distributor import runtime
    from distributor.checkpoint import context

    def fail(**_: Any) -> str:
        raise OSError(errno.ENOSPC, "no room")

    found, tempfile = [], context.tempfile
    for step in (1, 2):
        if runtime.rank() == 1:  # torch makes folders too
            context.tempfile = SimpleNamespace(mkdtemp=fail) if step == 1 else tempfile  # type: ignore[assignment]
        with pytest.raises(OSError, match="no room") if step == 1 else nullcontext():
            runtime.save_checkpoint({"value": torch.full((2,), step)}, step, wait=True)
        last = runtime.latest_checkpoint()
        found.append(last.step if last is not None else None)
    return found


@pytest.mark.slow
def test_a_rank_without_a_folder_for_uploads_holds_up_nobody(make_local: Make, tmp_path: Path) -> None:
    run = make_local(2, checkpoints=(tmp_path / "runs").as_uri()).submit(save_without_room_for_files)
    assert run.results(watch.DEADLINE) == [[None, 2]] * 2


@pytest.mark.long_on_executors
def test_a_place_that_cannot_be_written_to_is_found_at_the_start(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"checkpoints '.*file/runs' cannot be used: .*file is a file, not a folder"):
        make(2, checkpoints=tmp_path / "file" / "runs").run(checkpointed.write_files, 1, {0: "0", 1: "1"})
    with pytest.raises(StartError, match="cannot be used: .*nosuch"):
        make(2, checkpoints="nosuch://bucket").run(checkpointed.write_files, 1, {0: "0", 1: "1"})
    assert "Traceback" not in "".join(capfd.readouterr())


def train_at_a_store() -> list[Any]:
    """One rank with a store in its own memory that fails every third request, and then stays down."""
    import torch

    from distributor import runtime
    from distributor.machine import storage

    storage.PAUSES = (0.0,) * 5
    stores.BEFORE.append(stores.fail_every(3))
    model = torch.nn.Linear(4, 4)
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(step)
        runtime.save_checkpoint({"model": model}, step, wait=True)
    found: list[Any] = [runtime.load_checkpoint({"model": model}), model.weight[0, 0].item()]
    stores.BEFORE[:] = [stores.fail_every(1)]
    with pytest.raises(OSError, match="503 Slow Down"):
        runtime.save_checkpoint({"model": model}, 4, wait=True)
    stores.BEFORE.clear()
    last = runtime.latest_checkpoint()
    assert last is not None
    return [*found, last.step, sorted(path.name for path in last.path.iterdir() if not path.name.endswith(".lock"))]


@pytest.mark.long
def test_a_store_that_promises_little(make_local: Make) -> None:
    found = make_local(1, env={"DISTRIBUTOR_CHECKPOINTS": "forgetful://bucket/run"}).run(train_at_a_store)
    assert found == [3, 3.0, 3, [".metadata", "__0_0.distcp", "objects-0.pt"]]


def kill_at_random(run: Run, rng: random.Random) -> None:
    """Kills one rank after a random time."""
    time.sleep(rng.random() * 0.4)
    ranks = [process for process in watch.processes(run.id) if watch.is_fork(process)]
    os.kill(rng.choice(ranks).pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(60 * watch.DEADLINE)
@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.long)])
def test_kills_at_random_instants_of_saves(make_local: Make, kills: int, tmp_path: Path) -> None:
    """After each kill, all ranks load one committed step, not before the last one, with the weights of that step.

    Every second run commits a step before its kill, however slow the machine, so that there are steps to lose.
    """
    rng, ready, place = random.Random(2026), tmp_path / "ready", tmp_path / "runs"
    last = 0
    for kill in range(kills):
        ready.unlink(missing_ok=True)
        run = make_local(2, checkpoints=place, logs="none").submit(checkpointed.save_until_killed, str(ready))
        watch.until(ready.exists)
        if kill % 2 == 0:
            watch.until(lambda least=last: max(checkpointed.committed(place), default=0) > least)
        kill_at_random(run, rng)
        with pytest.raises(TrainingError, match="killed by SIGKILL"):
            run.result(watch.DEADLINE)
        steps = checkpointed.committed(place)
        assert steps and steps[0] >= last
        assert steps[0] <= int(ready.read_text().split()[-1]) + 1
        last = steps[0]
