"""More ranks and log files than the limit of open files allows a process."""

from __future__ import annotations

import json
from pathlib import Path

import programs
import pytest

DRIVER = """
import json, os, resource, sys

from distributor import TorchDistributor

ranks, soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def train():
    import torch.distributed as dist

    print("out of rank", os.environ["RANK"])
    print("err of rank", os.environ["RANK"], file=sys.stderr)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.add("here", 1)
    store.wait(["all"]) if store.add("here", 0) < ranks else store.set("all", "")
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


values = TorchDistributor(ranks, True, False).submit(train).results()
here = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
print(json.dumps({"ranks": sorted(set(values)), "count": len(values), "here": here}), file=sys.__stdout__)
"""


@pytest.mark.slow
def test_more_ranks_print_than_files_may_be_open(tmp_path: Path) -> None:
    """All are connected to the store at the same time. The limits of driver and ranks stay as they are."""
    done = programs.run(tmp_path, DRIVER, 140, 256, 4096)
    assert done.returncode == 0, done.stderr
    limits = json.loads(done.stdout.splitlines()[-1])
    assert limits == {"ranks": [256], "count": 140, "here": 256}
    for name, shown in (("out", done.stdout), ("err", done.stderr)):
        assert all(f"{name} of rank {rank}\n" in shown for rank in range(140))


@pytest.mark.slow
def test_a_limit_of_open_files_that_cannot_be_raised_is_warned_of(tmp_path: Path) -> None:
    done = programs.run(tmp_path, DRIVER, 2, 90, 90)
    assert done.returncode == 0, done.stderr
    assert "lets a process open only 90 files (ulimit -Hn), but the launcher of 2 ranks needs about 101" in done.stderr
