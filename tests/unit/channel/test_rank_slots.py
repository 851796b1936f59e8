"""What a rank leaves in its slot, and what it cannot."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Iterator

import pytest

from distributor.channel import rank_slots as slots
from distributor.channel.rank_slots import RankSlots, Slot


@pytest.fixture(params=["python", "libc"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankSlots]:
    if request.param == "libc":
        monkeypatch.delattr(os, "memfd_create")
    made = RankSlots(2)
    assert not os.get_inheritable(made.descriptor)
    yield made
    made.close()


def test_each_rank_has_a_slot(both: RankSlots) -> None:
    first, second = (Slot(both.descriptor, rank) for rank in range(2))
    assert first.write(b"raised")
    assert (slots.read(both.descriptor, 0), slots.read(both.descriptor, 1)) == (b"raised", None)
    assert second.write(b"x" * slots.ROOM)
    assert (slots.read(both.descriptor, 0), slots.read(both.descriptor, 1)) == (b"raised", b"x" * slots.ROOM)
    assert first.write(b"end")
    assert slots.read(both.descriptor, 0) == b"end"


def test_what_is_too_long_leaves_the_slot_as_it_is(both: RankSlots) -> None:
    slot = Slot(both.descriptor, 1)
    slot.write(b"brief")
    assert not slot.write(bytes(slots.ROOM + 1))
    assert slots.read(both.descriptor, 1) == b"brief"


def test_a_rank_needs_neither_descriptors_nor_room_for_files(both: RankSlots) -> None:
    pid = os.fork()
    if pid == 0:
        slot = Slot(both.descriptor, 0)
        os.closerange(3, 4096)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        os._exit(0 if slot.write(b"all the same") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert slots.read(both.descriptor, 0) == b"all the same"


def test_a_fork_of_a_rank_writes_nothing(both: RankSlots) -> None:
    slot = Slot(both.descriptor, 0)
    pid = os.fork()
    if pid == 0:
        os._exit(1 if slot.is_mine or slot.write(b"of the fork") else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert slots.read(both.descriptor, 0) is None


def test_what_a_rank_has_not_written_to_its_end_is_left_out(both: RankSlots) -> None:
    os.pwrite(both.descriptor, b"\xff" * 8, 0)
    assert slots.read(both.descriptor, 0) == b""


@pytest.mark.parametrize("after", [b"2" * 100, b"2" * 50])
def test_what_is_written_while_it_is_read_is_read_again(
    both: RankSlots, after: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, read = Slot(both.descriptor, 0), os.pread
    slot.write(b"1" * 100)
    torn = []

    def torn_pread(descriptor: int, size: int, offset: int) -> bytes:
        data = read(descriptor, size, offset)
        if size == 100 and not torn:
            slot.write(after)
            torn.append(data := data[:50] + read(descriptor, 50, offset + 50))
        return data

    monkeypatch.setattr(os, "pread", torn_pread)
    assert slots.read(both.descriptor, 0) == after
    assert torn


def test_reading_ends_although_a_rank_writes_all_the_time(both: RankSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, read, count = Slot(both.descriptor, 0), os.pread, itertools.count()

    def write_and_read(*args: int) -> bytes:
        slot.write(str(next(count)).encode())
        return read(*args)

    monkeypatch.setattr(os, "pread", write_and_read)
    assert slots.read(both.descriptor, 0) == b""
