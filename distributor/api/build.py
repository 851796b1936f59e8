"""Builds the job of a run from the user's request, the scheduler and this machine."""

from __future__ import annotations

import fnmatch
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

from distributor.api.parameters import Options
from distributor.display.view import View
from distributor.errors import ConfigurationError, PayloadError
from distributor.machine import devices, versions
from distributor.machine.storage import Url, is_url
from distributor.schedulers.base import Scheduler
from distributor.shipping import modules, project, tree
from distributor.text.wording import size
from distributor.values.checkpoints import absolute
from distributor.values.environment import CONTRACT
from distributor.values.files import WITH_THE_JOB, own
from distributor.values.job import Job, OutputDir, Target, Widths, WorkingDir
from distributor.values.launch_path import LaunchPath
from distributor.values.options import Project, Variables

SAMPLE_EVERY = 10.0  # seconds between two samples of a node's load, as in MLflow


def build_job(
    options: Options,
    widths: Widths,
    launch: LaunchPath,
    target: Target,
    folders: tuple[WorkingDir | None, OutputDir | None],
    scheduler: Scheduler | None,
    environ: Mapping[str, str],
    collect: Literal["rank0", "all"],
) -> Job:
    """Return the job of one run, with the smallest width. The run changes it once it knows how many slots are free.

    Without a scheduler, as there is no Spark session yet, the fields that depend on one have their defaults.
    """
    check_path(launch, options)
    resources = replace(options.resources, num_processes=widths.least)
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
        recovery=options.recovery,
        name=options.request.name,
        ranks_per_task=ranks_per_task,
        task_profile=task_profile,
        node_limit=None if scheduler is None else scheduler.node_limit(resources),
        spark_cpus=None if scheduler is None else scheduler.omp_threads,
        versions=versions.here(launch.needs),
        env={**launch.env(resources.use_gpu), **ranks_env(options.variables, environ)},
        working_dir=folders[0],
        output_dir=folders[1],
        checkpoints=None if options.project.checkpoints is None else absolute(options.project.checkpoints),
        collect=collect,
        widths=None if widths.fixed else widths,
        sample_every=SAMPLE_EVERY
        if any(getattr(each, "system_metrics", False) for each in options.request.callbacks)
        else None,
        tracked="" if any(hasattr(each, "run_for_ranks") for each in options.request.callbacks) else None,
    )


def check_path(launch: LaunchPath, options: Options) -> None:
    """Check that the options suit the launch path."""
    stall = options.deadlines.stall_timeout
    if launch.once and stall is not None:
        raise ConfigurationError(
            f"stall_timeout={stall:g} watches ranks, but the processes of launch={launch.name!r} are not ranks: leave "
            "stall_timeout out"
        )


def ranks_env(variables: Variables, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's variables for ranks: the forwarded ones, overridden by those in ``env``.

    >>> ranks_env(Variables(env={"A": "1"}, forward_env=["W_*", "RANK"]), {"W_KEY": "x", "RANK": "3", "B": "2"})
    {'W_KEY': 'x', 'A': '1'}
    """
    forwarded = {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in variables.forward_env)
        and name not in CONTRACT
        and (name not in devices.VISIBLE_DEVICES or name in variables.forward_env)  # a pattern gives ranks no GPUs
    }
    return {**forwarded, **variables.env}


def check_packages(launch: LaunchPath) -> None:
    """Check that this machine has the packages that ranks of this launch path must import."""
    for module, who in launch.needs.items():
        if modules.find(module) is None:
            raise ConfigurationError(
                f"{who} needs {module}, which is not installed for {sys.executable}: pip install "
                f"'distributor[{module}]'"
            )


def pack_working_dir(
    asked: Project, *, local: bool, view: View | None, log_dir: Path | None = None
) -> WorkingDir | None:
    """Return the project folder, packed unless ranks run on this machine, without what runs have put there."""
    if asked.working_dir is None:
        return None
    folder = project.absolute(asked.working_dir)
    if not folder.is_dir():
        raise PayloadError(f"working_dir {str(asked.working_dir)!r} is not a folder on the driver")
    if local:
        return WorkingDir(str(folder), None)
    with nullcontext() if view is None else view.packing(str(asked.working_dir)) as packed:
        try:
            apart = _written(asked, log_dir, Path(os.path.realpath(folder)))
            archive = project.pack_folder(folder, asked.working_dir_limit, packed, apart)
        except OSError as error:
            raise PayloadError(f"working_dir {str(asked.working_dir)!r} cannot be read: {error}") from error
    return WorkingDir(str(folder), archive)


def _place(asked: Project) -> Path | None:
    """Return the path of ``output_dir`` on the driver; ``None`` if it is a URL or is not given."""
    if asked.output_dir is None or is_url(asked.output_dir):
        return None
    return Path(os.path.realpath(project.absolute(Path(asked.output_dir))))


def _written(asked: Project, log_dir: Path | None, folder: Path) -> list[Path]:
    """Return the real paths of ``output_dir``, and of the folders inside ``folder`` for checkpoints and output."""
    checkpoints = None if asked.checkpoints is None else absolute(asked.checkpoints).dir
    inside = [Path(os.path.realpath(project.absolute(Path(each)))) for each in (checkpoints, log_dir) if each]
    return [*filter(None, [_place(asked)]), *(path for path in inside if folder in path.parents)]


def pack_output_dir(asked: Project, *, local: bool, view: View | None) -> OutputDir | None:
    """Return the folder or URL for the files that ranks write. It is not created yet.

    For other machines, the files that are there are packed, unless they are too large to be sent with the job: then
    nodes fetch them from the driver. Nodes fetch the files of a URL from there.
    """
    where, limit = asked.output_dir, asked.output_limit
    if where is None:
        return None
    if is_url(where):
        with _usable(where):
            url = Url(where)
            if url.folder is not None:
                _check_folder(url.folder)
            held = sum(own(url.sizes()).values())
        _check_held(where, held, limit)
        return OutputDir(where, limit)
    folder = _place(asked)
    assert folder is not None
    with _usable(where):
        _check_folder(folder)
    sizes = tree.sizes(str(folder))
    held = sum(sizes.values())
    _check_held(where, held, limit)
    if local or held > WITH_THE_JOB:
        return OutputDir(str(folder), limit, held)
    with _usable(where), nullcontext() if view is None else view.packing(where) as packed:
        archive = project.pack_files(folder, [folder / name for name in sizes], packed)
    return OutputDir(str(folder), limit, held, archive)


def make_output_dir(kept: OutputDir | None) -> None:
    """Create a run's ``output_dir``. If it is a URL, check that the driver can write there."""
    if kept is None:
        return
    with _usable(kept.where):
        if is_url(kept.where):
            Url(kept.where).check(f".distributor-{secrets.token_hex(6)}")
        else:
            os.makedirs(kept.where, exist_ok=True)


@contextmanager
def _usable(where: str) -> Iterator[None]:
    """Turn an ``OSError`` in the ``with`` block into a ``ConfigurationError`` about ``output_dir``."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"output_dir {where!r} cannot be used: {error}") from None


def _check_folder(folder: Path) -> None:
    """Raise an ``OSError`` if this user could not create a folder, or cannot write to it."""
    for path in (folder, *folder.parents):
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except FileNotFoundError:
            continue
        if not is_folder:
            raise OSError(f"{path} is not a folder")
        if not os.access(path, os.W_OK | os.X_OK):
            raise OSError(f"this user may not write to {path}")
        return


def _check_held(where: str, held: int, limit: int) -> None:
    if held > limit:
        raise PayloadError(
            f"output_dir {where!r} holds {size(held)}, more than output_limit ({size(limit)}), and all of it is copied "
            "to each node: raise output_limit, or pass another folder"
        )


def make_log_folder(log_dir: Path | None, run_id: str) -> Path | None:
    """Create a run's folder in ``log_dir``, and return it."""
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
