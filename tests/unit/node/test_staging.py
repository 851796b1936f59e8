"""What a node prepares for its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import make_job

from distributor import Checkpoints, StartError
from distributor.launch.assign_ranks import place
from distributor.launch.mpi.env import MpiEnv
from distributor.launch.torchrun import Torchrun
from distributor.node import staging
from distributor.node.staging import launcher_order
from distributor.values.dataset import MANIFEST, Dataset
from distributor.values.job import Job, WorkingDir
from distributor.values.launch_path import LaunchPath
from distributor.values.placement import NodeFacts, Placement
from distributor.values.plan import AgentOrder, Call, NodeOrder, Site


def ordered(job: Job, attempt: int = 0, sys_path: Sequence[str] = ()) -> NodeOrder:
    who: Placement = place([NodeFacts(0, "a", "host-a", "127.0.0.1", 4000, gpus=("0",), cpus=1)], job)
    site = Site(job, who.shares(whole=False)[0], {}, {}, "/tmp/node", attempt)
    agent = AgentOrder(b"", "a", [], [], "/tmp/node", "/", [*sys_path], None, on_driver=True)
    return launcher_order(agent, job.launch.plan(site), site)


@pytest.mark.parametrize(("working_dir", "found"), [(None, [f"{os.getcwd()}/lib"]), ("/work", ["/work", "/work/lib"])])
def test_the_users_pythonpath_comes_before_the_drivers_import_path(working_dir: str | None, found: list[str]) -> None:
    job = make_job(env={"PYTHONPATH": "lib::/shared"})
    job = replace(job, working_dir=None if working_dir is None else WorkingDir(working_dir))
    assert ordered(job, sys_path=["/driver"]).sys_path == (*found, "/shared", "/driver", "/")


def check(first: int, attempt: int, kept: bool = True) -> Call | None:
    """What ranks of an attempt call before their target, on a node whose job begins with another one."""
    checkpoints = Checkpoints("/shared") if kept else None
    job = make_job(attempt=first, checkpoints=checkpoints)
    return ordered(job, attempt).check


def test_new_nodes_look_whether_they_see_the_place_for_checkpoints() -> None:
    """Those of the first job and of later ones; not those that only start their ranks again."""
    looks = Call("distributor.checkpoint.start", "check_place")
    assert [check(0, 0), check(0, 1), check(2, 2), check(2, 3)] == [looks, None, looks, None]
    assert check(0, 0, kept=False) is None


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize(("launch", "through_torch"), [(Torchrun(), True), (MpiEnv(), False)])
def test_ranks_with_gpus_look_for_them_in_each_attempt(launch: LaunchPath, through_torch: bool, attempt: int) -> None:
    asks = Call("distributor.rank.gpus", "check", {"through_torch": through_torch})
    assert ordered(make_job(use_gpu=True, launch=launch), attempt).gpu_check == asks
    assert ordered(make_job(use_gpu=False, launch=launch), attempt).gpu_check is None


def test_a_node_that_does_not_see_the_data_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_VISIBLE", 0.1)
    job = replace(make_job(), data={"train": Dataset(str(tmp_path / "points"), 48)})
    with pytest.raises(StartError, match=r"data 'train': host-b does not see the folder '.*points'.*snapshot\(df"):
        staging.await_data(job, "host-b")
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / MANIFEST).touch()
    staging.await_data(job, "host-b")
