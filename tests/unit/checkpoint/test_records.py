"""The records of checkpoints, whole and torn, and which checkpoints stay."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Literal

import pytest

from distributor.checkpoint.records import (
    Index,
    Manifest,
    Shard,
    by_metric,
    folder_name,
    origin_of,
    read_manifest,
    surplus,
)
from distributor.errors import ConfigurationError
from distributor.values import sealed
from distributor.values.checkpoints import (
    Checkpoints,
    SharedMemory,
    absolute,
    check_checkpoints,
    from_environ,
    to_environ,
)
from distributor.values.sealed import DamagedError, seal


def manifest(number: int, **metrics: float) -> Manifest:
    shards = (Shard("model.pt", 5, 1), Shard("part/ö.bin", 0, 2))
    return Manifest(folder_name(number * 10, "3f-0", number), number, number * 10, 1.5, 2, "3f-0", shards, metrics)


def test_records_are_read_as_they_were_written() -> None:
    whole = manifest(3, loss=0.5, epoch=2**60 + 1)
    assert repr(read_manifest(seal(whole))) == repr(whole)  # whole numbers stay what they are
    assert sealed.read(Index, seal(Index(7, ("a", "b")))) == Index(7, ("a", "b"))


@pytest.mark.parametrize("record", [manifest(3), Index(7, ("a", "b"))])
def test_a_torn_record_is_no_record(record: Manifest | Index) -> None:
    data = seal(record)
    torn = [data[:end] for end in range(len(data) - 1)]
    changed = [data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] for place in range(0, len(data) - 1, 7)]
    for each in (*torn, *changed):
        with pytest.raises(DamagedError, match=r"\.json is (empty|incomplete or damaged)"):
            read_manifest(each) if isinstance(record, Manifest) else sealed.read(Index, each, "index-0.json")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]\n", b"null\n", b'{"format": "2"}\n', b'{"format": 1, "folders": 5}'])
def test_other_files_are_no_records(data: bytes) -> None:

    signed = data.rstrip(b"\n") + b"\n" + hashlib.sha256(data.rstrip(b"\n")).hexdigest().encode() + b"\n"
    for each in (data, signed):
        with pytest.raises(DamagedError):
            read_manifest(each)
        with pytest.raises(DamagedError):
            sealed.read(Index, each, "index-0.json")


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../b", "a\0b"])
def test_files_outside_the_checkpoint_are_refused(name: str) -> None:
    outside = replace(manifest(1), shards=(Shard(name, 1, 1),))
    with pytest.raises(DamagedError, match="Shard.name: the path .* is not relative"):
        read_manifest(seal(outside))


def test_only_folders_of_checkpoints_count_as_such() -> None:
    assert origin_of(folder_name(100, "3f2a-12", 7)) == "3f2a-12"
    for name in ("step-100", "step-x-3f-0-1", "step-100-3f-0-1.old", "steps", "step-100-zz-0-1"):
        assert origin_of(name) is None


def test_states_and_other_files_are_counted_separately() -> None:
    state = (Shard(".metadata", 1, 1), Shard("objects-0.pt", 1, 1))
    some = [
        replace(manifest(number, loss=number), shards=state) if number in (1, 2, 4) else manifest(number, loss=number)
        for number in range(1, 9)
    ]
    gone = surplus(some, Checkpoints("x", keep=2, best=("loss", "min")))
    assert [each.number for each in gone] == [6, 5]  # of each kind, the best one stays beside the newest


def test_the_newest_and_the_best_stay() -> None:
    losses = {1: 0.9, 2: 0.1, 3: float("nan"), 4: 0.5, 5: 0.4}
    some = [manifest(number, loss=loss) for number, loss in losses.items()]

    def gone(**options: object) -> set[int]:
        return {each.number for each in surplus(some, Checkpoints("x", **options))}  # type: ignore[arg-type]

    assert gone(keep=2) == {1, 2, 3}
    assert gone(keep=2, best=("loss", "min")) == {1, 3}
    assert gone(keep=2, best=("loss", "max")) == {2, 3}
    assert gone(keep=2, best=("accuracy", "max")) == {1, 2, 3}
    assert gone(keep=9) == gone(keep=None) == set()
    assert by_metric(some, Checkpoints("x")) == []


@pytest.mark.parametrize("which", ["min", "max"])
def test_of_equals_the_oldest_is_the_best(which: Literal["min", "max"]) -> None:
    """Saves between two evaluations have the value of the first, which is of the state that was evaluated."""
    some = [manifest(number, loss=0.5) for number in (3, 5, 4, 1, 2)]
    checkpoints = Checkpoints("x", keep=1, best=("loss", which))
    assert [each.number for each in by_metric(some, checkpoints)] == [1, 2, 3, 4, 5]
    assert {each.number for each in surplus(some, checkpoints)} == {2, 3, 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dir": ""}, "checkpoints must be the path of a folder or a URL"),
        ({"dir": "x", "keep": 0}, r"Checkpoints\(keep=...\) must be a positive integer, not 0"),
        ({"dir": "x", "best": "loss"}, r"must be the name of a metric and 'min' or 'max', .* not 'loss'"),
        ({"dir": "x", "best": ("loss", "least")}, r"not \('loss', 'least'\)"),
        ({"dir": "x", "memory": 2}, r"Checkpoints\(memory=...\) must be True or False, not 2"),
        ({"dir": "x", "memory": True, "replicate": 1}, r"Checkpoints\(replicate=...\) must be True or False, not 1"),
        ({"dir": "x", "replicate": True}, r"replicate=True\) copies what memory=True keeps: pass Checkpoints"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Checkpoints(**options)  # type: ignore[arg-type]


def test_settings_reach_ranks_through_their_environment() -> None:
    asked = Checkpoints("/shared/run", keep=None, best=("val loss", "max"))
    told = from_environ(to_environ(asked, "/tmp/node", {0: "a", 1: "b"}))
    assert (told.checkpoints, told.staging, told.hosts, told.is_given) == (asked, "/tmp/node", {0: "a", 1: "b"}, True)
    copied, memory = Checkpoints("/shared/run", memory=True, replicate=True), SharedMemory("/dev/shm/node", 5, True)
    told = from_environ(to_environ(copied, "/tmp/node", {}, memory))
    assert (told.checkpoints, told.memory) == (copied, memory)
    assert not from_environ({}).is_given
    with pytest.raises(ConfigurationError, match="checkpoints must be the path of a folder or a URL .* not 5"):
        check_checkpoints("checkpoints", 5)
    assert check_checkpoints("checkpoints", asked) is asked
    assert absolute(Checkpoints("s3://b/x")).dir == "s3://b/x"
    assert absolute(Checkpoints("x", keep=1)).dir.startswith("/")
