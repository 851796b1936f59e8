"""Memory that two ends share."""

import os

import numpy as np

from distributor.scoring.row_memory import RowMemory


def put(ours: RowMemory, theirs: RowMemory, arrays: list[np.ndarray]) -> tuple[int, list[np.ndarray]]:
    opened = ours.write([memoryview(each).cast("B") for each in arrays])
    for each in opened:
        theirs.open(each)
        os.close(each)
    read = theirs.read([each.nbytes for each in arrays])
    return len(opened), [np.frombuffer(part, each.dtype) for part, each in zip(read, arrays)]


def test_parts_are_read_in_place_aligned():
    ours, theirs = RowMemory(), RowMemory()
    arrays = [np.arange(5, dtype="uint8"), np.arange(3, dtype="float64"), np.empty(0, "float32")]
    opened, found = put(ours, theirs, arrays)
    assert opened == 1
    for sent, got in zip(arrays, found):
        assert (got == sent).all()
        assert got.ctypes.data % 64 == 0
        assert got.flags.writeable
    opened, again = put(ours, theirs, [np.full(5, 9, "uint8")])
    assert opened == 0
    assert (found[0] == 9).all(), "the next parts are in the same memory"
    assert again[0].ctypes.data == found[0].ctypes.data


def test_memory_grows_and_the_one_before_lives_while_it_is_read():
    ours, theirs = RowMemory(), RowMemory()
    before = len(os.listdir("/proc/self/fd"))
    _, (small,) = put(ours, theirs, [np.arange(10)])
    opened, (large,) = put(ours, theirs, [np.arange(1 << 18)])
    assert opened == 1
    assert (small == np.arange(10)).all()
    assert (large == np.arange(1 << 18)).all()
    del ours, theirs, small, large
    assert len(os.listdir("/proc/self/fd")) == before
