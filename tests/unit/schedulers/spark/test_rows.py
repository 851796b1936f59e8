"""What the rows of tasks say, and which bytes of the channel are the value that a row announces."""

from __future__ import annotations

import hashlib
import struct

import pytest

from distributor.channel.result_receiver import Arrived
from distributor.errors import ResultError
from distributor.schedulers.spark.rows import sort

VALUE = b"a pickled value"


def announced(rank: int, data: bytes) -> bytes:
    return b"D" + struct.pack("!IQ", rank, len(data)) + hashlib.sha256(data).digest()


def arrived(data: bytes) -> Arrived:
    return Arrived(memoryview(data), hashlib.sha256(data).digest())


def test_values_come_in_pieces_or_over_the_channel() -> None:
    rows = [b"V" + struct.pack("!I", 3) + b"one ", announced(1, VALUE), b"V" + struct.pack("!I", 3) + b"two"]
    values = sort(rows, {1: arrived(VALUE)}.get).values
    assert {rank: b"".join(pieces) for rank, pieces in values.items()} == {3: b"one two", 1: VALUE}


def test_what_the_channel_brought_is_not_copied() -> None:
    brought = arrived(VALUE)
    assert sort([announced(0, VALUE)], lambda rank: brought).values[0][0] is brought.data


def test_a_value_that_no_row_announces_is_dropped() -> None:
    assert sort([], lambda rank: arrived(VALUE)).values == {}


@pytest.mark.parametrize(
    ("brought", "told"),
    [
        pytest.param(None, "but nothing came", id="nothing"),
        pytest.param(arrived(VALUE[:-1]), "but 14 bytes with sha256", id="fewer"),
        pytest.param(arrived(VALUE[:-1] + b"!"), "but 15 bytes with sha256", id="other"),
        pytest.param(Arrived(memoryview(b"!"), hashlib.sha256(VALUE).digest()), "but 1 bytes with", id="another-size"),
    ],
)
def test_other_bytes_than_announced_are_refused(brought: Arrived | None, told: str) -> None:
    with pytest.raises(ResultError, match="rank 7 was not unpickled: its node announced 15 bytes") as caught:
        sort([announced(7, VALUE)], lambda rank: brought)
    assert told in str(caught.value)
    assert "return its path" in str(caught.value)
