"""What a user sees and does while a run goes: its lines, what ranks stand in, stalls, a wire that breaks."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trainings
import watch
from proxy import Proxy
from sessions import Make

from distributor import NodeLostError, StallError, Status, TorchDistributor, TrainingError
from distributor.channel.server import ChannelServer


def talk() -> None:
    for step in range(3):
        print(f"rank {trainings.rank()} step {step}")


@pytest.mark.parametrize(("logs", "ranks"), [("all", {0, 1, 2}), ("rank0", {0}), ("none", set()), ([2, 1], {1, 2})])
def test_whose_lines_are_shown(make_local: Make, logs: Any, ranks: set[int], capfd: pytest.CaptureFixture[str]) -> None:
    make_local(3, logs=logs).run(talk)
    shown = re.findall(r"^\[rank (\d) \S+\] rank (\d) step \d$", capfd.readouterr().out, re.MULTILINE)
    assert {int(rank) for rank, _ in shown} == ranks
    assert len(shown) == 3 * len(ranks)
    assert all(prefix == rank for prefix, rank in shown)


def test_equal_lines_of_many_ranks_are_folded(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    def same() -> None:
        for step in range(3):
            print("step", step, flush=True)
        print("only here" if trainings.rank() == 1 else "there", flush=True)

    make(3, fold_logs=True).run(same)
    out = capfd.readouterr().out
    # Ranks that are more than half a second apart are not waited for: any grouping is right that holds all lines.
    said = {rank: [] for rank in range(3)}  # type: ignore[var-annotated]
    for many, one, text in re.findall(r"^\[(?:ranks ([\d, -]+)|rank (\d) [^\]]*)\] (.*)$", out, re.MULTILINE):
        for part in (many or one).split(", "):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                said[rank].append(text)
    for rank, lines in said.items():
        assert lines == ["step 0", "step 1", "step 2", "only here" if rank == 1 else "there"]


def test_the_whole_output_is_kept_whatever_is_shown(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        for step in range(20_000):
            print("line", step)
        os.write(2, b"\xff no newline")

    run = make(3, logs="none", log_dir=tmp_path / "logs").submit(write)
    run.result()
    assert run.log_folder == tmp_path / "logs" / run.id
    for rank in range(3):
        assert (run.log_folder / f"rank-{rank}.stdout").read_text() == "".join(f"line {n}\n" for n in range(20_000))
        assert (run.log_folder / f"rank-{rank}.stderr").read_bytes() == b"\xff no newline"
    assert capfd.readouterr().out == ""


def stand(rendezvous: str) -> None:
    """Ranks 0 and 1 wait in an all-reduce for rank 2, which waits for a file."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    threading.Thread(target=background, args=(rendezvous,), daemon=True).start()
    if trainings.rank() == 2:
        wait_for_data(rendezvous)
    dist.all_reduce(torch.ones(1))


def background(path: str) -> None:
    wait_for_data(path)


def wait_for_data(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.1)


def test_stacks_tell_what_each_rank_is_doing(make: Make, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = make(3).submit(stand, str(go))
    assert run.dump_stacks() == {}  # nobody runs yet
    watch.until(lambda: run.status is Status.RUNNING)

    def summary() -> str:
        return str(run.dump_stacks()).splitlines()[0]

    watch.until(lambda: re.search(r"ranks 0-1 in all_reduce at test_live\.py:\d+; rank 2 in wait_for_data", summary()))
    stacks = run.dump_stacks()
    assert sorted(stacks) == [0, 1, 2]
    assert all("in stand" in text for text in stacks.values())
    assert all("in background" in text for text in stacks.values())
    alone = run.dump_stacks(all_threads=False)
    assert all("in stand" in text and "in background" not in text for text in alone.values())
    go.touch()
    assert run.results(timeout=watch.DEADLINE) == [None] * 3  # asking did no harm
    assert run.dump_stacks() == {}


@pytest.mark.slow_on_executors
def test_a_stall_ends_the_run_and_says_where_ranks_stand(make: Make, tmp_path: Path) -> None:
    run = make(3, stall_timeout=2, grace_period=1).submit(stand, str(tmp_path / "never"))
    with pytest.raises(StallError, match="no rank wrote anything or used CPU time for stall_timeout=2 s") as caught:
        run.result(timeout=2 * watch.DEADLINE)
    assert re.search(r"ranks 0-1 in all_reduce at test_live\.py:\d+; rank 2 in wait_for_data", str(caught.value))
    assert sorted(caught.value.stacks) == [0, 1, 2]
    assert run.status is Status.FAILED
    watch.gone(run.id, watch.ORPHAN_DEADLINE)


def test_work_without_words_is_no_stall(make_local: Make) -> None:
    def work() -> int:
        end = time.monotonic() + 4
        count = 0
        while time.monotonic() < end:
            count += 1
        return min(count, 1)

    assert make_local(1, stall_timeout=1).run(work) == 1


def test_words_without_work_are_no_stall(make_local: Make) -> None:
    def speak() -> int:
        for step in range(8):
            print(step)
            time.sleep(0.5)
        return 1

    assert make_local(1, stall_timeout=1.5).run(speak) == 1


def count_to(go: str) -> int:
    """Lines before, while and after the wire is reset."""
    number = 0
    while not os.path.exists(go):
        print("line", number, flush=True)
        number += 1
        time.sleep(0.01)
    for _ in range(100):
        print("line", number)
        number += 1
    return number


@pytest.mark.spark
def test_a_wire_that_breaks_costs_no_line(
    one_jvm: Any, wire: Proxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    run = TorchDistributor(2, False, False, log_dir=tmp_path).submit(count_to, str(go))
    watch.until(lambda: run.status is Status.RUNNING)
    kept = tmp_path / run.id / "rank-0.stdout"
    watch.until(kept.exists)
    for _ in range(3):
        connections, lines = wire.connections, kept.read_text().count("\n")
        wire.reset()
        watch.until(lambda: wire.connections > connections)
        watch.until(lambda: kept.read_text().count("\n") > lines + 10)
    go.touch()
    counts = run.results(timeout=watch.DEADLINE)
    out = capfd.readouterr().out
    for rank, count in enumerate(counts):
        whole = [f"line {number}" for number in range(count)]
        assert re.findall(rf"^\[rank {rank} \S+\] (.*)$", out, re.MULTILINE) == whole
        assert (tmp_path / run.id / f"rank-{rank}.stdout").read_text().splitlines() == whole


@pytest.mark.spark
def test_a_wire_that_is_cut_ends_both_sides(one_jvm: Any, wire: Proxy, tmp_path: Path) -> None:
    """Spark's own connections live on: the node itself finds out and stops its ranks."""
    run = TorchDistributor(2, False, False, heartbeat_timeout=2, grace_period=1).submit(
        trainings.wait_for, str(tmp_path / "never")
    )
    watch.until(lambda: run.status is Status.RUNNING)
    watch.until(lambda: run.snapshot().ranks_up == 2)
    wire.block()
    cut = time.monotonic()
    with pytest.raises(NodeLostError, match="heard (from it|nothing from the driver) for 2 s"):
        run.result(timeout=watch.DEADLINE)
    watch.gone(run.id, 2 + watch.ORPHAN_DEADLINE)
    assert time.monotonic() - cut < 2 + watch.ORPHAN_DEADLINE


@pytest.mark.spark
def test_logs_arrive_in_band_where_the_driver_cannot_be_reached(
    one_jvm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listen = ChannelServer.listen
    monkeypatch.setattr(ChannelServer, "listen", lambda self, *args: replace(listen(self, *args), port=1))
    run = TorchDistributor(2, False, False, log_dir=tmp_path).submit(talk)
    run.result(timeout=watch.DEADLINE)
    for rank in range(2):
        kept = tmp_path / run.id / f"rank-{rank}.stdout"
        assert kept.read_text() == "".join(f"rank {rank} step {step}\n" for step in range(3))
    warnings = [record for record in caplog.records if "cannot reach the driver" in record.getMessage()]
    assert len(warnings) == 1
    assert re.search(r"cannot reach the driver at \S+:1 \(", warnings[0].getMessage())


STRANGE = "\x1b]0;title\x07\x1b]52;c;aGVs\x1b\\\x1b[2J\x1b[31mloss\x1b[0m 0.5\n"


@pytest.mark.parametrize("log_escapes", [False, True])
def test_escape_sequences_of_ranks(
    make_local: Make, log_escapes: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The screen gets colours; the files get what was written; so does the screen where that is wanted."""

    def write() -> None:
        print(STRANGE, end="")
        raise ValueError(STRANGE)

    run = make_local(1, log_dir=tmp_path, log_prefix=False, log_escapes=log_escapes).submit(write)
    with pytest.raises(TrainingError) as caught:
        run.result()
    assert capfd.readouterr().out == (STRANGE if log_escapes else "\x1b[31mloss\x1b[0m 0.5\n")
    assert (tmp_path / run.id / "rank-0.stdout").read_text() == STRANGE
    assert "\x1b[31mloss\x1b[0m 0.5" in str(caught.value)
    assert not re.search(r"\x1b\]|\x1b\[2J|title|aGVs", str(caught.value).replace("STRANGE", ""))
