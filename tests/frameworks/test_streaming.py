"""mosaicml-streaming: shards of a data set, read by all ranks of a host together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import vision_ops
import watch
from sessions import Make

from distributor import TrainingError

vision_ops.declare()
pytest.importorskip("streaming")

pytestmark = pytest.mark.slow

SAMPLES = 64

#: The system in the table of docs/frameworks.md.
SYSTEM = ("mosaicml-streaming", "mosaicml-streaming")


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """A data set on disk."""
    from streaming import MDSWriter

    with MDSWriter(out=str(tmp_path / "shards"), columns={"x": "int"}, size_limit=200) as writer:
        for number in range(SAMPLES):
            writer.write({"x": number})
    return str(tmp_path / "shards")


def read(folder: str, kill: str = "") -> list[int]:
    """Reads the rank's share of one epoch."""
    import os
    import time
    from pathlib import Path

    import torch.distributed as dist
    from torch.utils.data import DataLoader

    vision_ops.declare()
    from streaming import StreamingDataset

    dist.init_process_group("gloo")
    data = StreamingDataset(local=folder, shuffle=True, batch_size=4)
    seen = [int(x) for batch in DataLoader(data, batch_size=4) for x in batch["x"]]
    if kill:
        Path(f"{kill}-{os.environ['RANK']}").touch()
        time.sleep(600)
    dist.barrier()
    return seen


@pytest.mark.framework(*SYSTEM, "each sample once")
def test_ranks_share_an_epoch(make: Make, spread: dict[str, Any], shards: str) -> None:
    seen = make(2, local_ranks="host", **spread).submit(read, shards).results(watch.DEADLINE)
    assert sorted(x for result in seen for x in result) == list(range(SAMPLES))
    assert {len(result) for result in seen} == {SAMPLES // 2}


@pytest.mark.framework(*SYSTEM, "no shared memory after run.kill()")
def test_a_run_that_is_killed_leaves_nothing_that_the_next_one_finds(make: Make, shards: str, tmp_path: Path) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    run = make(2, local_ranks="host").submit(read, shards, str(tmp_path / "ready"))
    watch.until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    run.kill()
    assert run.wait(watch.DEADLINE)
    watch.until(lambda: {path.name for path in Path("/dev/shm").iterdir()} <= before)
    assert len(make(2, local_ranks="host").submit(read, shards).results(watch.DEADLINE)) == 2


@pytest.mark.spark
@pytest.mark.framework(
    "mosaicml-streaming", "mosaicml-streaming", "the warning without local_ranks='host'", where="executors"
)
def test_executors_that_number_their_own_ranks_collide_and_are_advised(
    sessions: Any, shards: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from distributor import TorchDistributor

    sessions.get("local-cluster[2,2,1024]")
    distributor = TorchDistributor(2, False, False, max_processes_per_node=1)
    try:
        distributor.submit(read, shards).results(watch.DEADLINE)
    except TrainingError as error:
        assert "local_ranks='host'" in str(error) or 'local_ranks="host"' in str(error)
    output = capfd.readouterr()
    text = "streaming expects one LOCAL_RANK 0 on each host, but 2 executors of this run share this host"
    assert re.search(text, output.out + output.err)
