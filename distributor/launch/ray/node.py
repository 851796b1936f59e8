"""The companion: a process on each node, beside the ranks. It starts Ray there with ``ray start``, and ends Ray."""

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

from distributor.machine import folders, network
from distributor.rank import gpus
from distributor.values.environment import CONTRACT, NODE_ID

#: Number of seconds between checks whether Ray has started.
_POLL = 0.05

#: The file that Ray writes into its folder as the last step of its start on a node. Source:
#: ``ray._private.utils.write_ray_address``.
_STARTED = "ray_current_cluster"

#: The first version of Ray that, in a test, refused clients without the run's token.
_LEAST = (2, 60)

#: Environment variables that Ray's workers must not get. Ray itself sets ``OMP_NUM_THREADS`` for them. With torchrun's
#: variables, ``init_process_group`` in a worker would wait forever for a store that no process serves.
_NOT_FOR_WORKERS = {"OMP_NUM_THREADS", *CONTRACT} - {NODE_ID}


def serve(
    head: tuple[str, int] | None, arguments: Sequence[str], temporary: str, use_gpu: bool, ready: Callable[[], None]
) -> NoReturn:
    """Run Ray on this node until SIGTERM, or until Ray ends. Never returns.

    Args:
        head: address and port of Ray's head; ``None`` if this node is the head.
        arguments: further arguments of ``ray start``, such as resources, addresses and ports.
        temporary: the folder for Ray's files.
        use_gpu: whether Ray's workers use this node's GPUs. Nodes without a rank check only here that they are there.
        ready: called once the node is part of the Ray cluster.
    """
    refused = gpus.missing(through_torch=False) if use_gpu else None
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
    """Return why a version of Ray is refused; ``None`` if the version is accepted.

    Ray must accept only clients that have the run's secret token. Old versions also accept clients without this token.

    >>> too_old("2.60.0")
    >>> too_old("2.9.3")
    "Ray 2.9.3 is too old: install 2.60 or later, which accepts only clients with the run's token"
    """
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= _LEAST:
        return None
    least = ".".join(map(str, _LEAST))
    return f"Ray {version} is too old: install {least} or later, which accepts only clients with the run's token"


def environment(environ: Mapping[str, str], path: Sequence[str]) -> dict[str, str]:
    """Return the environment of Ray's processes, in which workers can import the same modules as ranks.

    Args:
        environ: this process's environment.
        path: this process's import path, ``sys.path``.

    >>> environment({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "1", "HOME": "/root"}, ["/job", "", "/lib"])
    {'HOME': '/root', 'PYTHONPATH': '/job:/lib'}
    """
    kept = {name: value for name, value in environ.items() if name not in _NOT_FOR_WORKERS}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, path))}
