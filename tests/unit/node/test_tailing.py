"""Following log files on a node: in order, whole, without waiting for anybody, and without filling the disk."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from distributor.channel.frames import MAX_LOG
from distributor.node import tailing
from distributor.node.tailing import Tailing
from distributor.schedulers.hosting import report
from distributor.values.messages import Rest, Skipped
from distributor.values.outcome import Log


class Uplink:
    """Remembers what it gets; ``has`` is what a driver would have of it."""

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self.said: list[dict[str, object]] = []

    async def send_log(self, log: Log) -> None:
        self.logs.append(log)

    def send(self, message: dict[str, object]) -> None:
        self.said.append(message)

    def text(self, rank: int = 0, stream: int = 1) -> bytes:
        return b"".join(log.data for log in self.logs if (log.rank, log.stream) == (rank, stream))


def follow(path: Path, keep: bool = False, shipped: tuple[int, ...] | None = None) -> tuple[Tailing, Uplink]:
    files, uplink = Tailing([(0, 1, path)], shipped, keep), Uplink()
    files.ship_to(uplink)  # type: ignore[arg-type]
    return files, uplink


def drain(files: Tailing) -> None:
    asyncio.run(files.drain())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=10))
def test_what_is_written_arrives_once_and_in_order(tmp_path_factory: pytest.TempPathFactory, pieces) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("logs") / "rank-0.stdout"
    files, uplink = follow(path)
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece)
        drain(files)
    assert uplink.text() == b"".join(pieces)
    assert [log.offset for log in uplink.logs] == [
        sum(len(p.data) for p in uplink.logs[:index]) for index in range(len(uplink.logs))
    ]


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    files, uplink = follow(tmp_path / "later")
    drain(files)
    (tmp_path / "later").write_bytes(b"now\n")
    drain(files)
    assert uplink.text() == b"now\n"


def test_large_output_comes_in_bounded_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(bytes(3 * MAX_LOG + 5))
    files, uplink = follow(path)
    drain(files)
    assert [len(log.data) for log in uplink.logs] == [MAX_LOG] * 3 + [5]


def test_a_live_view_that_is_far_behind_skips_whole_lines_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [b"line %07d\n" % number for number in range(1_000_000)]
    path.write_bytes(b"".join(lines))
    files, uplink = follow(path)
    drain(files)
    (said,) = uplink.said
    shown = uplink.text().splitlines(keepends=True)
    assert said == Skipped(0, 1, 1_000_000 - len(shown), said.offset)
    assert shown == lines[-len(shown) :]
    assert uplink.logs[0].offset == said.offset
    assert 0 < len(shown) * 13 <= tailing._KEEP_OF_LAG


def test_nothing_is_skipped_where_the_driver_keeps_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x\n" * (tailing.MAX_LAG // 2 + 10))
    files, uplink = follow(path, keep=True)
    drain(files)
    assert uplink.said == []
    assert len(uplink.text()) == path.stat().st_size


def test_ranks_that_nobody_wants_to_see_are_not_sent_but_have_a_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000 + b"the end\n")
    files, uplink = follow(path, shipped=())
    drain(files)
    assert uplink.logs == []
    assert files.tails[0].endswith(b"the end\n")
    assert len(files.tails[0]) <= tailing._TAIL_BYTES
    assert files.rest() == ()


def test_after_a_break_it_goes_on_where_the_driver_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    files, uplink = follow(path)
    drain(files)
    files.driver_has({(0, 1): 4}, True)
    drain(files)
    assert [(log.offset, log.data) for log in uplink.logs] == [(0, b"0123456789"), (4, b"456789")]
    assert files.tails[0] == b"0123456789"


def test_the_rest_is_what_the_driver_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    files, _ = follow(path, keep=True)
    assert files.rest() == (Rest(0, 1, str(path), 0),)
    drain(files)
    files.driver_has({(0, 1): 4}, False)
    assert files.rest() == (Rest(0, 1, str(path), 4),)
    files.driver_has({(0, 1): 10}, False)
    assert files.rest() == ()


def test_the_last_lines_that_a_break_has_lost_are_part_of_the_rest(tmp_path: Path) -> None:
    """The connection breaks after the last piece was sent, and its other end has not got all."""
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    files, _ = follow(path)
    drain(files)
    files.driver_has({(0, 1): 4}, True)
    assert list(report.rest(files.rest(), 1 << 20)) == [(0, 1, 4, b"456789")]
    drain(files)
    files.driver_has({(0, 1): 10}, False)
    assert files.rest() == ()


def test_of_live_output_only_the_last_is_part_of_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    size = 2 * tailing._RELEASE_STEP
    path.write_bytes(b"x" * size)
    files, _ = follow(path)
    files.stop_shipping()
    drain(files)  # which frees disk space
    assert list(report.rest(files.rest(), 1 << 20)) == [(0, 1, size - 65536, b"x" * 65536)]
    unlinked = Tailing([(0, 1, path)], None, False)
    drain(unlinked)
    assert unlinked.rest() == (), "output is not shown live"


def test_more_files_than_may_be_open_are_followed(tmp_path: Path) -> None:
    """With few descriptors left, as where many ranks print."""
    paths = [tmp_path / f"rank-{rank}.stdout" for rank in range(300)]
    for path in paths:
        path.write_bytes(b"first\n")
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 128, before[1]))
    try:
        files, uplink = Tailing([(rank, 1, path) for rank, path in enumerate(paths)], None, False), Uplink()
        files.ship_to(uplink)  # type: ignore[arg-type]
        drain(files)
        with paths[7].open("ab") as file:
            file.write(b"more\n")
        drain(files)
        assert len(os.listdir("/proc/self/fd")) < taken + 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [uplink.text(rank) for rank in range(300) if rank != 7] == [b"first\n"] * 299
    assert uplink.text(7) == b"first\nmore\n"


def test_output_that_a_rank_has_removed_is_left_out(tmp_path: Path) -> None:
    kept, removed = tmp_path / "rank-0.stdout", tmp_path / "rank-1.stdout"
    for path in (kept, removed):
        path.write_bytes(b"first\n")
    files, uplink = Tailing([(0, 1, kept), (1, 1, removed)], None, False), Uplink()
    files.ship_to(uplink)  # type: ignore[arg-type]
    removed.unlink()
    drain(files)
    assert (uplink.text(0), uplink.text(1)) == (b"first\n", b"")


def test_output_is_read_to_its_end_after_a_rank_has_removed_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.stdout"
    path.touch()
    files, uplink = follow(path)
    drain(files)
    with path.open("ab") as file:
        path.unlink()
        file.write(b"all of it\n")
    drain(files)
    assert uplink.text() == b"all of it\n"
    assert files.rest() == (), "nobody could read it"


@pytest.mark.parametrize("shipped", [None, ()])
def test_disk_space_of_what_is_done_with_is_given_back(tmp_path: Path, shipped: tuple[int, ...] | None) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (tailing.MAX_LAG - 1))
    files, _ = follow(path, shipped=shipped)
    before = path.stat().st_blocks
    drain(files)
    files.driver_has({(0, 1): tailing.MAX_LAG - 1}, False)
    drain(files)
    with path.open("ab") as file:
        file.write(b"more")
    assert path.stat().st_size == tailing.MAX_LAG + 3
    if path.stat().st_blocks == before:
        pytest.skip("this file system has no holes")
    assert path.stat().st_blocks < before / 2
    drain(files)
    assert files.tails[0].endswith(b"xmore")


@pytest.mark.parametrize("shipped", [None, ()])
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([b"before\n", b"x\n", b"after\n"], id="as a shell does with > /dev/stderr"),
        pytest.param([b"one\n", b"x\ntwo\n", b"three\n"], id="it has grown again, so that the size does not show it"),
    ],
)
def test_output_goes_on_after_a_rank_has_truncated_it(
    tmp_path: Path, parts: list[bytes], shipped: tuple[int, ...] | None
) -> None:
    first, second, third = parts
    path = tmp_path / "log"
    path.write_bytes(first)
    files, uplink = follow(path, shipped=shipped)
    drain(files)
    path.write_bytes(second)
    drain(files)
    with path.open("ab") as file:
        file.write(third)
    drain(files)
    assert files.tails[0] == first + second + third
    sent = [(0, first), (len(first), second), (len(first + second), third)]
    assert [(log.offset, log.data) for log in uplink.logs] == ([] if shipped == () else sent)


@pytest.mark.parametrize(
    ("has", "rest", "again"),
    [
        (9, [], []),
        (8, [(0, 1, 8, b"\n")], [(8, b"\n")]),
        (4, [(0, 1, 7, b"x\n")], [(4, b"x\n")]),  # nobody has the bytes between
    ],
)
def test_what_the_driver_does_not_have_of_truncated_output(
    tmp_path: Path, has: int, rest: list[object], again: list[object]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    files, uplink = follow(path, keep=True)
    drain(files)
    path.write_bytes(b"x\n")
    drain(files)
    uplink.logs.clear()
    files.driver_has({(0, 1): has}, False)
    assert list(report.rest(files.rest(), 1 << 20)) == rest
    files.driver_has({(0, 1): has}, True)
    drain(files)
    drain(files)
    assert [(log.offset, log.data) for log in uplink.logs] == again
    assert files.tails[0] == b"before\nx\n"


def test_a_file_that_is_truncated_while_lines_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x\n" * tailing.MAX_LAG)
    files, uplink = follow(path)
    read = os.pread

    def truncated(descriptor: int, size: int, offset: int) -> bytes:
        os.truncate(path, 2)
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", truncated)
    drain(files)
    assert files.tails == {0: b"x\n"}
    assert uplink.text() == b"x\n"
