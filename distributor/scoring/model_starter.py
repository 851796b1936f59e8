"""Runs in a process that a task starts: gets a model's server from a warm process, or becomes it."""

from __future__ import annotations

import os
from contextlib import suppress

from distributor.machine import bootstrap, model_servers, processes
from distributor.schedulers.hosting import warm_client
from distributor.scoring import wire
from distributor.values.job import Warmth


def main(folder: str, owner: str, count: str, keep: str, timeout: str) -> None:
    """Start the server (entry point), which gets these arguments and standard input, the folder's lock."""
    warmth: Warmth = {
        "keep": float(keep),
        "preload": ["distributor.scoring.model_process"],
        "env": {},
        "ranks_per_task": 1,
        "spark_cpus": None,
        "use_gpu": os.path.exists(os.path.join(folder, model_servers.GPUS)),
    }
    package, arguments = os.path.join(folder, wire.PACKAGE), (folder, owner, count, keep, timeout)
    with suppress(OSError):  # such as a full disk
        if warm_client.forks_model(package, int(owner), warmth, processes.cpu_count(), {"lock": 0}, arguments):
            return
    command = bootstrap.command(package, "model", *arguments)
    os.execv(command[0], command)
