"""The job of a run: what the user asks for, with what the scheduler and this machine add to it."""

from __future__ import annotations

import fnmatch
import secrets
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from distributor.api.options import Options
from distributor.display.view import View
from distributor.errors import ConfigurationError, PayloadError
from distributor.machine import versions
from distributor.schedulers.base import Scheduler
from distributor.shipping import modules, project
from distributor.values.environment import CONTRACT
from distributor.values.job import Job, Target, WorkingDir
from distributor.values.launch import LaunchPath
from distributor.values.options import Project, Variables


def build_job(
    options: Options,
    launch: LaunchPath,
    target: Target,
    working_dir: WorkingDir | None,
    scheduler: Scheduler | None,
    environ: Mapping[str, str],
    collect: Literal["rank0", "all"],
) -> Job:
    """Return the job of one run.

    Args:
        options: what the user asks for.
        launch: the launch path, resolved for this run.
        target: what each rank runs.
        working_dir: the project folder, packed if it must travel.
        scheduler: where the run trains; ``None`` if there is no session yet; what a scheduler decides then stays open.
        environ: the driver's environment, some of which may be forwarded.
        collect: whose return values travel back.

    Raises:
        ConfigurationError, ResourceError: the scheduler cannot provide the resources.
    """
    resources = options.resources
    ranks_per_task, task_profile = (1, None) if scheduler is None else scheduler.shape(resources)
    return Job(
        run_id=secrets.token_hex(6),
        target=target,
        launch=launch,
        resources=resources,
        deadlines=options.deadlines,
        output=options.output,
        network=options.network,
        startup=options.startup,
        training=options.training,
        name=options.request.name,
        ranks_per_task=ranks_per_task,
        task_profile=task_profile,
        node_limit=None if scheduler is None else scheduler.node_limit(resources),
        spark_cpus=None if scheduler is None else scheduler.omp_threads,
        versions=versions.here(),
        env={**launch.env(resources.use_gpu), **ranks_env(options.variables, environ)},
        working_dir=working_dir,
        collect=collect,
    )


def ranks_env(variables: Variables, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the user gives to ranks: forwarded ones of the driver's, then ``env``.

    The rank contract is never forwarded.

    Example:
        >>> ranks_env(Variables(env={"A": "1"}, forward_env=["W_*", "RANK"]), {"W_KEY": "x", "RANK": "3", "B": "2"})
        {'W_KEY': 'x', 'A': '1'}
    """
    forwarded = {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in variables.forward_env) and name not in CONTRACT
    }
    return {**forwarded, **variables.env}


def check_packages(launch: LaunchPath) -> None:
    """Check that this machine has the packages that ranks import.

    Raises:
        ConfigurationError: a package is missing.
    """
    for module, who in launch.needs.items():
        if modules.find(module) is None:
            raise ConfigurationError(
                f"{who} needs {module}, which is not installed for {sys.executable}: pip install "
                f"'distributor[{module}]'"
            )


def pack_working_dir(asked: Project, *, local: bool, view: View | None) -> WorkingDir | None:
    """Return the project folder: as it is for ranks on this machine, otherwise packed while the view shows progress.

    Raises:
        PayloadError: it is not a folder, or too large.
        ConfigurationError: it is relative, and the current directory does not exist.
    """
    if asked.working_dir is None:
        return None
    folder = project.absolute(asked.working_dir)
    if not folder.is_dir():
        raise PayloadError(f"working_dir {str(asked.working_dir)!r} is not a folder on the driver")
    if local:
        return WorkingDir(str(folder), None)
    with nullcontext() if view is None else view.packing(str(asked.working_dir)) as packed:
        return WorkingDir(str(folder), project.pack_folder(folder, asked.working_dir_limit, packed))


def make_log_folder(log_dir: Path | None, run_id: str) -> Path | None:
    """Make the folder for a run's output; ``None`` if the user wants none.

    Raises:
        ConfigurationError: the folder cannot be made, or it is relative and the current directory does not exist.
    """
    if log_dir is None:
        return None
    folder = project.absolute(log_dir) / run_id
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(
            f"log_dir {str(log_dir)!r} cannot be used: {folder} cannot be created: {error.strerror}"
        ) from error
    return folder
