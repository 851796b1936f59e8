"""The scheduler of local mode, with the same agents as on Spark."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from distributor.channel.server import ChannelServer
from distributor.errors import ConfigurationError, PayloadError, ResourceError, RunCancelledError
from distributor.launch import assign_ranks
from distributor.machine import devices, folders, limits, network, processes
from distributor.schedulers.hosting import agents
from distributor.schedulers.hosting.host_node import host_node
from distributor.schedulers.hosting.report import pieces, rest
from distributor.shipping import package, project
from distributor.text import wording
from distributor.values import layout
from distributor.values.job import Job, Module, StatusDetail, Target, TaskProfile, warmth
from distributor.values.messages import Importing, NodeResult, Sent
from distributor.values.options import Resources
from distributor.values.outcome import Collected, Log
from distributor.values.placement import NodeFacts, Placement
from distributor.values.plan import AgentOrder

#: Ranks of one machine talk over loopback, so that no other machine can reach their ports.
_ADDRESS = "127.0.0.1"

_CHUNK = 64 << 20

T = TypeVar("T")

#: The GPUs that runs of this process hold. Waiters are woken when some are released.
_held: set[str] = set()
_released = threading.Condition()


class LocalScheduler:
    """Runs a job's ranks on this machine."""

    def __init__(self, nodes: int = 1, gpus: Sequence[str] | None = None) -> None:
        self._nodes = nodes  # agents that share the ranks: one, but for tests
        self._gpus = gpus  # addresses that Spark found for the driver; None to look
        self._looked = False  # whether this machine was asked which of the GPUs are there
        self._agents: list[agents.Agent] = []
        self._lock = threading.Lock()
        self._cancelled = False
        self._waits = False  # for GPUs that other runs hold

    def check(self, job: Job) -> None:
        if sys.platform != "linux":
            raise ConfigurationError(
                f"local mode needs Linux, but this is {sys.platform}: use a Linux machine or container, or "
                "local_mode=False with Spark executors on Linux"
            )
        project.current_folder()
        if (needed := package.call_size(job)) > (free := limits.free_memory()):
            raise PayloadError(
                f"{job.title} has {wording.size(needed)} of data with it, but this machine has only "
                f"{wording.size(free)} of free memory: save the data to a file, and load parts inside the function"
            )
        if not os.access(sys.executable or "", os.X_OK):
            raise ConfigurationError(
                f"ranks are started with sys.executable, but {sys.executable!r} is not a program: set sys.executable "
                "to the path of this Python, or train on Spark executors (local_mode=False)"
            )
        if (reason := folders.unusable()) is not None:
            raise ConfigurationError(
                f"the temporary folder cannot be used ({reason}): make it usable, or set TMPDIR to another folder "
                "before Python starts"
            )
        if network.address_towards(_ADDRESS) is None:
            is_up = network.address_towards("::1") is not None  # it has only IPv6
            remedy = f"give loopback this address (ip addr add {_ADDRESS}/8 dev lo)"
            raise ConfigurationError(
                f"ranks of one machine talk over loopback, but {_ADDRESS} cannot be reached here: "
                + (remedy if is_up else "bring loopback up (ip link set lo up)")
            )

    def shape(self, resources: Resources) -> tuple[int, TaskProfile | None]:
        count = resources.num_processes
        if resources.max_processes_per_node is not None and count > resources.max_processes_per_node:
            raise ResourceError(
                f"num_processes={count} is more than max_processes_per_node={resources.max_processes_per_node}, and "
                "local mode has only one node, this machine: raise max_processes_per_node, or train on Spark "
                "executors (local_mode=False)"
            )
        for name, amount, there, unit in _supplies(resources):
            if amount * count > there:
                raise ResourceError(
                    f"{name} asks for {amount:,} {unit} for each of {count} processes, {amount * count:,} in all, but "
                    f"this machine has {there:,}: lower {name} or num_processes"
                )
        if resources.use_gpu:
            self._check_gpus(count, resources.gpus_per_process or 1)
        return 1, None

    def node_limit(self, resources: Resources) -> int | None:
        return resources.max_processes_per_node

    on_driver = True
    reports_slots = True
    slots_may_come = False  # the resources of this machine do not change
    omp_threads = None  # only the user can have set OMP_NUM_THREADS

    def _check_gpus(self, count: int, per_rank: int) -> None:
        if not self._looked:
            self._gpus, self._looked = self._look(), True
        there = len(self._gpus or ())
        if there == 0:
            raise ResourceError(
                f"use_gpu=True, but this machine, the driver, has no visible GPU ({_said()}): pass use_gpu=False to "
                "train on CPUs, or local_mode=False to train on Spark executors"
            )
        if there < count * per_rank:
            asked = f"gpus_per_process={per_rank} for each of " if per_rank > 1 else ""
            lower = ["gpus_per_process"] * (per_rank > 1) + ["num_processes"] * (count > 1)
            raise ResourceError(
                f"{asked}num_processes={count} with use_gpu=True needs {wording.count(count * per_rank, 'GPU')}, but "
                f"this machine has {wording.count(there, 'visible GPU')}: lower {' or '.join(lower)} or pass "
                f"use_gpu=False ({_said()})"
            )

    def _look(self) -> Sequence[str]:
        """Return the GPUs of this machine as positions in CUDA_VISIBLE_DEVICES, by which the placement maps them."""
        if self._gpus is None:
            return [str(index) for index in range(len(devices.local_gpus(os.environ)))]
        visible = devices.parse_visible(devices.visible_devices(os.environ))
        names = devices.through_mapping(self._gpus, visible, socket.gethostname())
        return self._gpus[: len(devices.local_gpus(devices.rank_visibility(names, True)))]

    def placed(self, job: Job) -> Placement:
        """Return the job's placement, with placeholders for ports: a run chooses these when it starts."""
        if job.resources.use_gpu:
            self._check_gpus(job.resources.num_processes, job.resources.gpus_each)
        unknown = [-1] * job.launch.ports * job.resources.num_processes
        return assign_ranks.place(_facts(job, range(-self._nodes, 0), unknown, self._gpus or ()), job)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=target, name="distributor-run")

    def room(self, job: Job) -> int:
        if self._agents:
            return 0
        asked = job.resources
        most = asked.num_processes if job.widths is None else job.widths.most
        rooms = [] if asked.max_processes_per_node is None else [asked.max_processes_per_node]
        rooms += [there // amount for _, amount, there, _ in _supplies(asked)]
        if asked.use_gpu:
            with _released:
                rooms.append(sum(gpu not in _held for gpu in self._gpus or ()) // asked.gpus_each)
                self._waits = rooms[-1] < asked.num_processes
        return min(rooms, default=most)

    def leaving(self) -> str | None:
        return None

    def again(self, job: Job) -> LocalScheduler:
        return LocalScheduler(self._nodes, self._gpus)

    def waiting_for(self) -> StatusDetail | None:
        return StatusDetail("waiting for GPUs of other runs" if self._waits else "starting a process on this machine")

    def cancel(self) -> bool:
        with self._lock:
            self._cancelled = True
            for agent in self._agents:
                agent.kill()
        with _released:
            _released.notify_all()
        return False

    @contextmanager
    def _acquire_gpus(self, job: Job) -> Iterator[Sequence[str]]:
        """Hold the run's GPUs, once as many are free; none once the run is cancelled."""
        needed = job.resources.num_processes * job.resources.gpus_each if job.resources.use_gpu else 0
        mine: Sequence[str] = ()

        def are_free() -> bool:
            nonlocal mine
            mine = [gpu for gpu in self._gpus or () if gpu not in _held][:needed]
            return len(mine) == needed

        with _released:
            self._waits = not are_free()
            _released.wait_for(lambda: self._cancelled or are_free())
            self._waits = False
            if len(mine) < needed:
                raise RunCancelledError(f"run {job.label} was cancelled while it waited for GPUs of other runs")
            _held.update(mine)
        try:
            yield mine
        finally:
            with _released:
                _held.difference_update(mine)
                _released.notify_all()

    def run(self, job: Job, server: ChannelServer) -> Collected:
        with self._acquire_gpus(job) as gpus:
            return self._run(job, server, gpus)

    def _run(self, job: Job, server: ChannelServer, gpus: Sequence[str]) -> Collected:
        listeners = [network.listen(_ADDRESS) for _ in range(self._nodes)]
        reserved = [network.reserve(_ADDRESS) for _ in range(job.launch.ports * job.resources.num_processes)]
        try:
            ports, free = ([held.getsockname()[1] for held in holders] for holders in (listeners, reserved))
            facts = _facts(job, ports, free, gpus)
            executors = list(dict.fromkeys(fact.executor for fact in facts))
            calls = [partial(self._node, job, server, facts, *pair) for pair in zip(executors, listeners)]
            parts = _in_threads(calls, self.cancel)
        finally:
            for held in (*listeners, *reserved):
                held.close()
        return Collected(
            reports=tuple(report for part in parts for report in part.reports),
            values={rank: chunks for part in parts for rank, chunks in part.values.items()},
            lost_hosts=tuple(host for part in parts for host in part.lost_hosts),
            logs=tuple(log for part in parts for log in part.logs),
        )

    def _node(
        self, job: Job, server: ChannelServer, facts: list[NodeFacts], executor: str, listener: socket.socket
    ) -> Collected:
        """Run one node's agent until it has sent its report."""
        lead = next(fact for fact in facts if fact.executor == executor)
        root = package.package_root()
        with host_node(job.job_id, lead.partition) as node:
            channel, theirs = socket.socketpair()
            with theirs:
                server.attach(channel)
                agent = node.start(
                    root,
                    {"channel": theirs, "store": listener},
                    owner=os.getpid(),
                    warmth=warmth(job),
                    task_cpus=lead.cpus,
                    wanted=lambda: not self._cancelled,
                    importing=lambda module: server.hear(executor, Importing(executor, self._nodes, module)),
                )
            listener.close()
            with self._lock:
                self._agents.append(agent)
                if self._cancelled:
                    agent.kill()
            rest, call = package.take_call(job)
            if call is not None:  # ranks map the file that this process has open
                layout.call(node.folder).symlink_to(f"/proc/{os.getpid()}/fd/{call.fileno()}")
            order = AgentOrder(
                job=pickle.dumps(rest),
                executor=executor,
                placed=[],
                facts=[asdict(fact) for fact in facts],
                folder=node.folder,
                root=root,
                sys_path=_import_path(job.target),
                endpoint=None,
                on_driver=True,
                note=agent.note,
                secret=secrets.token_hex(16),
            )
            if (result := node.converse(order)) is None:
                server.await_loss(executor)  # the driver can then say in the error why the node was lost
            return _collected(result)


def _said() -> str:
    """Return in words which GPUs the environment names, and which nvidia-smi lists."""
    return devices.described(os.environ, devices.list_gpus())


def _supplies(asked: Resources) -> Iterator[tuple[str, int, int, str]]:
    """Yield option, amount per rank, amount on this machine, and unit of each requested resource except GPUs."""
    if asked.cpus_per_process is not None:
        yield "cpus_per_process", asked.cpus_per_process, processes.cpu_count(), "CPUs"
    if asked.memory_per_process is not None:
        yield "memory_per_process", max(1, asked.memory_per_process >> 20), limits.total_memory() >> 20, "MiB of memory"


def _collected(result: NodeResult | None) -> Collected:
    """Read a report and the files that it names, before these are removed with the node's folder."""
    if result is None:  # the agent died before it reported
        return Collected(lost_hosts=(socket.gethostname(),))
    return Collected(
        (pickle.loads(result.report),),
        {rank: list(pieces(value, _CHUNK)) for rank, value in result.values.items() if not isinstance(value, Sent)},
        logs=tuple(Log(*piece) for piece in rest(result.rest, _CHUNK)),
    )


def _in_threads(calls: Sequence[Callable[[], T]], end: Callable[[], object]) -> list[T]:
    """Run calls concurrently, the last in this thread, or ``end()`` them if one cannot start. Raise the first error."""
    results: dict[int, T] = {}
    raised: list[BaseException] = []

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            results[index] = call()
        except BaseException as error:
            raised.append(error)

    threads: list[threading.Thread] = []
    try:
        for item in enumerate(calls[:-1]):
            thread = threading.Thread(target=run, args=item, daemon=True)  # the driver can exit
            thread.start()
            threads.append(thread)
        run(len(calls) - 1, calls[-1])
    except BaseException as error:
        raised.append(error)
        end()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return [results[index] for index in range(len(calls))]


def _facts(job: Job, ports: Sequence[int], reserved: Sequence[int], gpus: Sequence[str]) -> list[NodeFacts]:
    """Return the facts that Spark's tasks would report, one entry for each rank. Nodes get ranks evenly, in order."""
    cpus = job.resources.cpus_per_process or max(1, processes.cpu_count() // job.resources.num_processes)
    per_rank, of_path = job.resources.gpus_each, job.launch.ports
    return [
        NodeFacts(
            partition=rank,
            executor=f"{_ADDRESS}:{port}",
            host=socket.gethostname(),
            address=_ADDRESS,
            port=port,
            gpus=tuple(gpus[rank * per_rank : (rank + 1) * per_rank]) if job.resources.use_gpu else (),
            visible_devices=devices.visible_devices(os.environ),
            cpus=cpus,
            mounts=_ADDRESS,
            ports=tuple(reserved[rank * of_path : (rank + 1) * of_path]),
        )
        for rank in range(job.resources.num_processes)
        for port in [ports[rank * len(ports) // job.resources.num_processes]]
    ]


def _import_path(target: Target) -> list[str]:
    """Return the driver's import path. For a module, the current directory comes first, as with ``python -m``."""
    here = [os.getcwd()] if isinstance(target, Module) else []
    return [*here, *(path or os.getcwd() for path in sys.path)]
