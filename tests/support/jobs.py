"""Jobs for tests, from the names of options."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from distributor.api.parameters import GROUPS, OPTIONS, Options
from distributor.launch.torchrun import Torchrun
from distributor.values.job import Job, Module, Target
from distributor.values.options import declared

#: The job's own fields, some of which are called as an option that they come from.
OWN = {field.name for field in fields(Job)}


def make_job(
    run_id: str = "3f2a",
    num_processes: int = 1,
    target: Target = Module("train"),
    use_gpu: bool = False,
    ranks_per_task: int = 1,
    *,
    launch: Any = Torchrun(),
    **given: Any,
) -> Job:
    """A job; ``given`` are options of the API, or fields of the job, which come first."""
    asked = {name: value for name, value in given.items() if name in OPTIONS and name not in OWN}
    rest = {name: value for name, value in given.items() if name not in asked}
    options = Options.of(num_processes=num_processes, use_gpu=use_gpu, **asked)
    return Job(
        run_id=run_id,
        target=target,
        launch=launch,
        ranks_per_task=ranks_per_task,
        **{name: getattr(options, name) for name in GROUPS if name in OWN},
        **{"node_limit": options.resources.max_processes_per_node, **rest},
    )


def changed(job: Job, **given: Any) -> Job:
    """A job with other values of some options or fields."""
    if "max_processes_per_node" in given:
        given = {"node_limit": given["max_processes_per_node"], **given}
    for group, kind in GROUPS.items():
        asked = {name: given.pop(name) for name in declared(kind) if name in given and name not in OWN}
        if asked:
            given[group] = replace(getattr(job, group), **asked)
    return replace(job, **given)


class SparkError(Exception):
    """What Spark raises on the driver."""

    __module__ = "py4j.protocol"
