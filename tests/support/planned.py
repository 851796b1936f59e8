"""Jobs, placements and plans for tests of launch paths: one task for each letter of ``executors``."""

from __future__ import annotations

from typing import Any

from jobs import make_job

from distributor.launch.assign_ranks import place
from distributor.launch.torchrun import Torchrun
from distributor.values.job import Function, Job
from distributor.values.placement import NodeFacts, Placement
from distributor.values.plan import Plan, Site

TMP = "/tmp/distributor-run7-x"


def job(num_processes: int = 3, launch: Any = Torchrun(), **fields: Any) -> Job:
    target = fields.pop("target", Function("train", b""))
    return make_job("run7", num_processes, target, launch=launch, **{"use_gpu": False, **fields})


def placed(request: Job, executors: Any = "aba", **common: Any) -> Placement:
    gpus = request.resources.use_gpu and "gpus" not in common
    facts = [
        NodeFacts(
            partition,
            name,
            f"host-{name}",
            f"10.0.0.{ord(name) - 96}",
            5000 + partition,
            ports=tuple(range(6000 + 10 * partition, 6000 + 10 * partition + request.launch.ports)),
            **{**common, **({"gpus": (str(partition),)} if gpus else {})},
        )
        for partition, name in enumerate(executors)
    ]
    return place(facts, request)


def plans(launch: Any, executors: str = "aba", folder: str = TMP, **options: Any) -> list[Plan]:
    """The plans of all nodes, which know no more than the path asks for."""
    request = job(len(executors), launch, **options)
    shares = placed(request, executors).shares(whole=launch.all_nodes)
    return [launch.plan(Site(request, share, {}, folder=folder)) for share in shares]
