"""Torch's look-ups of peers' names: off in this process and its forks, and told where they cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distributor.rank import lookups

#: Prints whether descriptors, threads and files are as they were before.
SWITCH = """
import os, sys
import torch.distributed
from distributor.rank import lookups

def here():
    return sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), os.listdir(sys.argv[1])

before = here()
lookups.switch_off(sys.argv[1])
print(here() == before)
"""


def test_switching_off_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SWITCH, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_a_store_that_takes_other_arguments_leaves_look_ups_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def store(host: str) -> None: ...

    monkeypatch.setattr("torch.distributed.TCPStore", store)
    monkeypatch.setattr(lookups, "_done", False)
    lookups.switch_off(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_comes_up_at_once_is_no_warning() -> None:
    assert lookups.warning(0.3, "10.0.0.1") is None


def test_a_store_that_waits_for_a_name_server_is_one() -> None:
    told = lookups.warning(10.2, "10.0.0.1")
    assert told is not None
    assert told.startswith(
        "waited 10 s for torch's rendezvous store, most likely because a name server did not answer for 10.0.0.1"
    )
