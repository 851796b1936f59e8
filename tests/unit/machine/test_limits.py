"""Shared and locked memory that is too little, and sizes as people write them."""

import pytest

from distributor.machine import limits
from distributor.machine.limits import Limits

GIB = 1 << 30


def shortages(ranks=2, use_gpu=True, **fields):
    good = {"shared_memory": 8 * GIB, "locked_memory": None, "address_space": None, "infiniband": True}
    return limits.shortages(Limits(**{**good, **fields}), ranks, use_gpu)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, None),
        ({"shared_memory": None}, None),
        ({"shared_memory": 64 << 20}, ["64 MiB of /dev/shm", "256 MiB or more", "--shm-size", "emptyDir"]),
        ({"shared_memory": GIB, "ranks": 32}, ["1,024 MiB of /dev/shm", "2,048 MiB or more"]),
        ({"locked_memory": 8 << 20}, ["8 MiB of memory only (ulimit -l)", "ibv_reg_mr", "NCCL_IB_DISABLE=1"]),
        ({"locked_memory": 8 << 20, "infiniband": False}, None),
        ({"locked_memory": 8 << 20, "use_gpu": False}, None),
        ({"address_space": 2 * GIB}, ["2,048 MiB (ulimit -v", "spark.executor.pyspark.memory"]),
    ],
)
def test_what_is_too_little(fields, words):
    found = shortages(**fields)
    assert len(found) == (words is not None)
    for word in words or ():
        assert word in found[0]


def test_this_machine():
    here = limits.here()
    assert here.shared_memory is None or here.shared_memory > 0
    assert 1 << 20 < limits.total_memory() < 1 << 50


@pytest.mark.parametrize(
    ("text", "unit", "size"),
    [
        ("8g", "", 8 * GIB),
        ("512 MB", "", 512 << 20),
        ("1.5k", "", 1536),
        ("1GiB", "", GIB),
        ("2", "m", 2 << 20),
        ("7b", "m", 7),
        ("7", "", 7),
    ],
)
def test_sizes(text, unit, size):
    assert limits.parse_memory(text, unit) == size


@pytest.mark.parametrize("text", ["", "g", "-1g", "8 gigs", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError):
        limits.parse_memory(text)
