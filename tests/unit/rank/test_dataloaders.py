"""Workers of DataLoaders end with their rank, whoever else sends them SIGTERM."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, signal, sys
from distributor.rank import dataloaders
if sys.argv[1] == "shielded":
    dataloaders.keep_workers()
    dataloaders.keep_workers()
from torch.utils.data import DataLoader
if __name__ == "__main__":
    # A worker that is killed while it sends a tensor leaves it in /dev/shm.
    batches = iter(DataLoader(range(10**6), num_workers=2, collate_fn=list, multiprocessing_context=sys.argv[2]))
    for _ in range(8):
        next(batches)
    workers = batches._workers
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    for _ in range(100):
        next(batches)
    print("both live", flush=True)
    for worker in workers:
        worker.terminate()
        worker.join()
"""


@pytest.mark.parametrize(
    ("how", "method", "lives"), [("shielded", "fork", True), ("shielded", "spawn", True), ("plain", "fork", False)]
)
def test_workers_outlive_sigterm_and_end_when_their_rank_ends_them(how: str, method: str, lives: bool) -> None:
    ended = subprocess.run([sys.executable, "-c", CODE, how, method], capture_output=True, text=True, timeout=60)
    assert ("both live" in ended.stdout) == lives, ended.stderr
