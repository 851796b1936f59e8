"""Describes what a run would do, without starting it."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace

from distributor.machine import devices
from distributor.shipping.package import package_zip
from distributor.text.wording import count, size, without_token
from distributor.values import environment
from distributor.values.job import Function, Job, Module, Script, Target
from distributor.values.placement import Node, Placement
from distributor.values.plan import Plan, Site

#: Placeholders for what is decided when a run starts.
_FOLDER = "$RUN_FOLDER"
_PORT = "$PORT"
_MASTER = "$MASTER"
_CPUS = "$CPUS_OF_TASK"
_GPUS = "$GPUS_OF_NODE"
_OWN_GPUS = "$GPUS_OF_RANK"
_INTERFACE = "$INTERFACE"
_NODES = "$NODES"
_RANKS = "$RANKS_OF_NODE"
#: Stands for a port that is not known yet; shown as ``_PORT``.
_UNKNOWN = -1

_OPEN = (_FOLDER, _PORT, _MASTER, _CPUS, _GPUS, _OWN_GPUS, _INTERFACE, _NODES, _RANKS)

#: Environment variables and Spark settings whose values may be secrets.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)


def describe(
    job: Job, where: str, placement: Placement | None = None, settings: Mapping[str, str] | None = None
) -> str:
    """Describe a run: where it runs, each rank's command and environment, the configuration, and what is shipped.

    Without ``placement``, it is decided when the run starts.

    >>> from distributor import TorchDistributor
    >>> from distributor.schedulers.local import LocalScheduler
    >>> job = TorchDistributor(2, True, use_gpu=False).plan(Module("json.tool"))
    >>> print(describe(job, "this machine", LocalScheduler().placed(job)))  # doctest: +ELLIPSIS
    run           module json.tool
    on            this machine: 2 ranks, on CPUs
    placement     node 0 on ...: ranks 0-1
    command       python -m json.tool   (in each rank, started by torch's elastic agent; launch path: torchrun)
    ships         nothing: ranks run on this machine
    ...
    """
    plan = _plan(job, placement)
    rows = [
        ("run", _words(job.target)),
        ("on", f"{where}: {_counted(job)}, {_devices(job, placement)}"),
        ("placement", "by Spark, when the run starts" if placement is None else str(placement)),
        (
            "command",
            f"{_command(plan.target)}   (in each rank, started by torch's elastic agent; "
            f"launch path: {job.launch.name})",
        ),
        *(("companions", f"{companion.name}, on each node") for companion in plan.companions),
        ("ships", _shipped(job) if placement is None else "nothing: ranks run on this machine"),
        ("limits", _limits(job)),
    ]
    lines = [f"{name:<13} {text}" for name, text in rows]
    lines += ["", "environment of every rank, in addition to its machine's:", *_shown(plan.node_env)]
    lines += ["", "environment of rank 0:", *_shown(plan.rank_env[0])]
    if any(name in line for line in lines for name in _OPEN):
        lines += [
            "",
            "Values that begin with $ are decided when the run starts.",
        ]
    if (config := job.launch.deepspeed_config) is not None:
        lines += ["", "DeepSpeed's configuration:", json.dumps(json.loads(config), indent=2)]
    if settings:
        lines += ["", "Spark's settings:", *_shown(settings)]
    return "\n".join(lines)


def _plan(job: Job, placement: Placement | None) -> Plan:
    """Return the plan of node 0."""
    if placement is not None:
        plan = job.launch.plan(Site(job, placement.shares(whole=True)[0], os.environ, {}, _FOLDER))
        return _with_open_ports(replace(plan, rank_env=tuple({**env, "MASTER_PORT": _PORT} for env in plan.rank_env)))
    cpus = job.resources.cpus_per_process or 1
    processes = job.resources.num_processes
    ports = (_UNKNOWN,) * processes * job.launch.ports
    cpus *= job.ranks_per_task
    node = Node(0, "?", "?", _MASTER, _UNKNOWN, 0, 0, job.world_size, task_cpus=cpus, ports=ports, slots=processes)
    # Executors have their own environment. Its settings for network interfaces are unknown here.
    (share,) = Placement((node,)).shares(whole=True)
    plan = job.launch.plan(Site(job, share, {}, environment.sockets({}, _INTERFACE), _FOLDER))
    decided = {name: _GPUS for name in devices.VISIBLE_DEVICES if job.resources.use_gpu}
    if job.resources.cpus_per_process is None:
        decided["OMP_NUM_THREADS"] = _CPUS
    of_rank = {
        "MASTER_PORT": _PORT,
        **dict.fromkeys(("GROUP_WORLD_SIZE", "CROSS_SIZE"), _NODES),
        **dict.fromkeys(("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), _RANKS),
        **dict.fromkeys(devices.VISIBLE_DEVICES if job.resources.use_gpu else (), _OWN_GPUS),
    }
    return _with_open_ports(
        replace(
            plan,
            node_env={**plan.node_env, **decided, **job.env},
            rank_env=tuple({name: of_rank.get(name, value) for name, value in env.items()} for env in plan.rank_env),
        )
    )


def _with_open_ports(plan: Plan) -> Plan:
    """Return a plan whose environment variables have a placeholder for each port that is not known yet."""

    def shown(value: str) -> str:
        return re.sub(rf":{_UNKNOWN}\b", f":{_PORT}", value)

    return replace(
        plan,
        node_env={name: value and shown(value) for name, value in plan.node_env.items()},
        rank_env=tuple({name: shown(value) for name, value in env.items()} for env in plan.rank_env),
    )


def _counted(job: Job) -> str:
    """Return the number of ranks, or of slots for Ray's workers, in words."""
    number = job.resources.num_processes
    if job.widths is not None:
        return f"{job.widths.least} to {count(job.widths.most, 'rank')}"
    return f"slots for {count(number, 'Ray worker')}" if job.launch.once else count(number, "rank")


def _words(target: Target) -> str:
    if isinstance(target, Function):
        return f"function {target.name}"
    return f"{'script' if isinstance(target, Script) else 'module'} {_name(target)}"


def _name(target: Script | Module) -> str:
    if isinstance(target, Module):
        return target.name
    path = os.path.relpath(target.path)
    return target.path if path.startswith("..") else path


def _command(target: Target) -> str:
    if isinstance(target, Function):
        return f"{target.name}(...)"
    start = ["python", "-m"] if isinstance(target, Module) else ["python"]
    words = [*start, _name(target), *target.argv]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Return a word quoted for a shell, unless it contains a placeholder."""
    return word if any(name in word for name in _OPEN) else shlex.quote(word)


def _devices(job: Job, placement: Placement | None) -> str:
    if not job.resources.use_gpu:
        return "on CPUs"
    return f"with {count(job.resources.gpus_each, 'GPU')} each{', requested from Spark' if placement is None else ''}"


def _shipped(job: Job) -> str:
    parts = [f"this package ({size(len(package_zip()))})"]
    if isinstance(job.target, Script):
        parts.append(f"the script ({size(len(job.target.source))})")
    if job.working_dir is not None and job.working_dir.archive is not None:
        parts.append(f"{job.working_dir.path} ({size(len(job.working_dir.archive))})")
    kept = job.output_dir
    if kept is not None and kept.held:
        # Without an archive, nodes fetch the files from the driver.
        parts.append(f"the files in {kept.where} ({size(kept.held if kept.archive is None else len(kept.archive))})")
    return ", ".join(parts)


def _limits(job: Job) -> str:
    deadlines, recovery = job.deadlines, job.recovery
    stall = "no stall limit" if deadlines.stall_timeout is None else f"stalled after {deadlines.stall_timeout:g} s"
    return (
        f"start within {deadlines.start_timeout:g} s, {deadlines.grace_period:g} s to save when stopped, {stall}, "
        f"heartbeats at least every {deadlines.heartbeat_timeout:g} s"
        + (f", at most {count(recovery.max_restarts, 'restart')}" if recovery.max_restarts else "")
    )


def _shown(env: Mapping[str, str | None]) -> list[str]:
    return [
        f"  {name} is removed"
        if value is None
        else f"  {name}={'***' if _SECRET.search(name) else _quoted(without_token(value))}"
        for name, value in sorted(env.items())
    ]
