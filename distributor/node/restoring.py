"""Copies the files of earlier runs from ``output_dir`` into the ranks' current directory, before the ranks start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from distributor.channel.requests import fetch_files
from distributor.errors import StartError
from distributor.node.url_writer import UrlWriter
from distributor.shipping import project, tree
from distributor.text.wording import size
from distributor.values.files import WITH_THE_JOB, make_way, mark, own
from distributor.values.job import Job, OutputDir
from distributor.values.messages import Fetch
from distributor.values.plan import AgentOrder


def restore(
    job: Job, order: AgentOrder, folder: str, node_rank: int, uploads: UrlWriter | None, *, reached: bool
) -> None:
    """Copy the files of ``output_dir`` into ``folder``. On the driver's machine or if ``order.in_place``, replace none.

    StartError if ``output_dir`` is a URL that this node cannot use or that holds more than ``output_limit``, or if it
    is on the driver, which cannot be reached.
    """
    kept = job.output_dir
    if kept is None:
        return
    if uploads is not None:
        uploads.check(mark(job.run_id), f"{mark(job.run_id)}-{node_rank}")
        _download(uploads, kept, Path(folder), keep=order.on_driver or order.in_place)
    elif order.on_driver:
        _copy(Path(kept.where), Path(folder))
    elif kept.archive is not None:
        project.unpack_folder(kept.archive, Path(folder), keep=order.in_place)
    elif order.endpoint is not None and reached:
        request = Fetch(order.executor, order.secret)
        silence = job.deadlines.heartbeat_timeout
        fetch_files(
            order.endpoint, request, folder, silence, lambda name: not (order.in_place and _is_in(folder, name))
        )
    else:
        raise StartError(
            f"this node cannot reach the driver, from which it must copy the {size(kept.held)} of output_dir "
            f"{kept.where!r}. Pass a URL as output_dir, open the ports of driver_ports=, or use a folder of at most "
            f"{size(WITH_THE_JOB)}, which is sent with the job"
        )


def _is_in(folder: str, name: str) -> bool:
    return os.path.lexists(os.path.join(folder, name))


def _download(uploads: UrlWriter, kept: OutputDir, folder: Path, *, keep: bool) -> None:
    sizes = own(uploads.sizes())
    held = sum(sizes.values())
    if held > kept.limit:
        raise StartError(
            f"output_dir {kept.where!r} holds {size(held)}, more than output_limit ({size(kept.limit)}): raise "
            "output_limit, or pass another folder"
        )
    for name in sizes:
        if not (keep and _is_in(str(folder), name)):
            uploads.get(name, make_way(str(folder), name))


def _copy(source: Path, folder: Path) -> None:
    for name in tree.sizes(str(source)):
        target = folder / name
        if not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target)
