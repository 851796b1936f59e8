"""Output of ranks: which lines are shown, what is kept, and a connection that breaks."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import trainings
import watch
from proxy import Proxy
from sessions import Make

from distributor import Status, TorchDistributor, TrainingError


def talk() -> None:
    for step in range(3):
        print(f"rank {trainings.rank()} step {step}")


@pytest.mark.slow
@pytest.mark.parametrize(("logs", "ranks"), [("all", {0, 1, 2}), ("rank0", {0}), ("none", set()), ([2, 1], {1, 2})])
def test_logs_chooses_the_ranks_whose_lines_are_shown(
    make_local: Make, logs: Any, ranks: set[int], capfd: pytest.CaptureFixture[str]
) -> None:
    make_local(3, logs=logs).run(talk)
    shown = re.findall(r"^\[rank (\d) \S+\] rank (\d) step \d$", capfd.readouterr().out, re.MULTILINE)
    assert {int(rank) for rank, _ in shown} == ranks
    assert len(shown) == 3 * len(ranks)
    assert all(prefix == rank for prefix, rank in shown)


@pytest.mark.long_on_executors
def test_equal_lines_of_many_ranks_are_folded(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    def same() -> None:
        for step in range(3):
            print("step", step, flush=True)
        print("only here" if trainings.rank() == 1 else "there", flush=True)

    make(3, fold_logs=True).run(same)
    out = capfd.readouterr().out
    # Ranks that are more than half a second apart are not waited for: any grouping is right that holds all lines.
    lines_of = {rank: [] for rank in range(3)}  # type: ignore[var-annotated]
    for many, one, text in re.findall(r"^\[(?:ranks ([\d, -]+)|rank (\d) [^\]]*)\] (.*)$", out, re.MULTILINE):
        for part in (many or one).split(", "):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                lines_of[rank].append(text)
    for rank, lines in lines_of.items():
        assert lines == ["step 0", "step 1", "step 2", "only here" if rank == 1 else "there"]


@pytest.mark.long_on_executors
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
def test_a_connection_that_is_reset_costs_no_line(
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
@pytest.mark.long
def test_logs_arrive_through_spark_where_the_driver_cannot_be_reached(
    one_jvm: Any, unreachable: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = TorchDistributor(2, False, False, log_dir=tmp_path).submit(talk)
    run.result(timeout=watch.DEADLINE)
    for rank in range(2):
        kept = tmp_path / run.id / f"rank-{rank}.stdout"
        assert kept.read_text() == "".join(f"rank {rank} step {step}\n" for step in range(3))
    warnings = [record for record in caplog.records if "cannot reach the driver" in record.getMessage()]
    assert len(warnings) == 1
    assert re.search(r"cannot reach the driver at \S+:1 \(", warnings[0].getMessage())


STRANGE = "\x1b]0;title\x07\x1b]52;c;aGVs\x1b\\\x1b[2J\x1b[31mloss\x1b[0m 0.5\n"


@pytest.mark.slow
@pytest.mark.parametrize("log_escapes", [False, True])
def test_only_colours_of_ranks_are_shown_unless_asked_for(
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
