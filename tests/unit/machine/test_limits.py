"""Shared and locked memory that is too little."""

import resource
import subprocess
import sys

import pytest

from distributor.machine import limits
from distributor.machine.limits import Limits

GIB = 1 << 30


def shortages(ranks=2, use_gpu=True, needed=100, **fields):
    good = {"shared_memory": 8 * GIB, "locked_memory": None, "address_space": None, "infiniband": True}
    return limits.shortages(Limits(**{**good, **fields}), ranks, use_gpu, needed)


def test_free_memory_is_a_part_of_all():
    before = limits.free_memory()
    assert 0 < before <= limits.total_memory()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, None),
        ({"shared_memory": None}, None),
        ({"shared_memory": 64 << 20}, ["64 MiB of /dev/shm", "256 MiB or more", "--shm-size", "emptyDir"]),
        ({"shared_memory": GIB, "ranks": 32}, ["1,024 MiB of /dev/shm", "2,048 MiB or more"]),
        ({"locked_memory": 8 << 20}, ["8 MiB of memory (ulimit -l)", "ibv_reg_mr", "NCCL_IB_DISABLE=1"]),
        ({"locked_memory": 8 << 20, "infiniband": False}, None),
        ({"locked_memory": 8 << 20, "use_gpu": False}, None),
        ({"files": 100}, None),
        (
            {"files": 99, "ranks": 3},
            ["open only 99 files (ulimit -Hn)", "launcher of 3 ranks needs about 100", "nofile="],
        ),
        ({"address_space": 2 * GIB}, ["2,048 MiB (ulimit -v", "spark.executor.pyspark.memory"]),
    ],
)
def test_limits_that_are_too_low_are_warned_of(fields, words):
    found = shortages(**fields)
    assert len(found) == (words is not None)
    for word in words or ():
        assert word in found[0]


def test_the_limit_of_open_files_is_raised_here_and_set_elsewhere():
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        limits.raise_open_files(150)
        assert limits.open_files() == 200  # it was enough
        limits.raise_open_files(300)
        assert limits.open_files() == 300
        limits.raise_open_files(1 << 40)
        assert limits.open_files() == limits.here().files == hard
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        limits.set_open_files(child.pid, 200)
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (200, hard)
        child.communicate(b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_this_machine():
    here = limits.here()
    assert here.shared_memory is None or here.shared_memory > 0
    assert 1 << 20 < limits.total_memory() < 1 << 50


@pytest.mark.parametrize(
    ("tasks", "soft", "words"),
    [
        (10, 400, None),
        (100, 456, None),
        (1000, 1000, "open only 1,000 files (ulimit -Hn), but a run of 1,000 tasks needs about 2,256"),
    ],
)
def test_a_driver_may_have_connections_to_all_tasks(tasks, soft, words):
    code = f"""
import resource
from distributor.machine import limits
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 1000))
print(limits.driver_sockets({tasks}), limits.open_files())
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.endswith(f" {soft}\n")
    assert words in told if words else told.startswith("None ")
