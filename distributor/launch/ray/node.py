"""The companion that starts Ray on a node with ``ray start``, and ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from distributor.machine import devices, folders, network
from distributor.rank import gpus
from distributor.values.environment import CONTRACT, NODE_ID

_POLL = 0.05  # seconds

#: The file that Ray writes as the last step of its start: ``ray._private.utils.write_ray_address``.
_STARTED = "ray_current_cluster"

_LEAST = (2, 60)  # the first version that, in a test, refused clients without the run's token

#: Ray itself sets ``OMP_NUM_THREADS`` for its workers. With torchrun's variables, ``init_process_group`` in a worker
#: would wait forever for a store that no process serves.
_NOT_FOR_WORKERS = {"OMP_NUM_THREADS", *CONTRACT} - {NODE_ID}


def serve(
    head: tuple[str, int] | None, arguments: Sequence[str], temporary: str, use_gpu: bool, ready: Callable[[], None]
) -> NoReturn:
    """Run Ray on this node until SIGTERM or Ray's end; on the head's node, ``head`` is ``None``. Never returns."""
    refused = gpus.missing(through_torch=False) if use_gpu else None  # nodes without a rank check only here
    if (refused := refused or too_old(metadata.version("ray"))) is not None:
        sys.exit(refused)
    folders.make_private(temporary)
    if head is not None:
        network.connect_once_up(head).close()
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", *arguments]
    process = subprocess.Popen(command, env=environment(os.environ, sys.path))
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    started = Path(temporary, _STARTED)
    while process.poll() is None and not started.exists():
        time.sleep(_POLL)
    if process.poll() is None:
        ready()
    sys.exit(process.wait())


def too_old(version: str) -> str | None:
    """Return why a version of Ray is refused: old ones accept clients without the run's token.

    >>> too_old("2.60.0")
    >>> too_old("2.9.3")
    "Ray 2.9.3 is too old: install 2.60 or later, which accepts only clients with the run's token"
    """
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= _LEAST:
        return None
    least = ".".join(map(str, _LEAST))
    return f"Ray {version} is too old: install {least} or later, which accepts only clients with the run's token"


def environment(environ: Mapping[str, str], path: Sequence[str]) -> dict[str, str]:
    """Return the environment of Ray's processes, in which workers can import what ranks can.

    >>> environment({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "1", "HOME": "/root"}, ["/job", "", "/lib"])
    {'HOME': '/root', 'PYTHONPATH': '/job:/lib'}
    """
    amd = {"CUDA_VISIBLE_DEVICES"} if devices.has_amd() else set()  # of two settings, Ray changes one for its workers
    kept = {name: value for name, value in environ.items() if name not in _NOT_FOR_WORKERS | amd}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, path))}
