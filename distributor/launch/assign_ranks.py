"""Decide which rank runs where, from the facts of all tasks.

The driver computes the placement once or, without the facts, each node does: functions here have no side effects, so
that all nodes get the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from distributor.errors import ResourceError, StartError
from distributor.machine import devices, versions
from distributor.text.wording import count
from distributor.values.job import Job
from distributor.values.placement import Node, NodeFacts, Numbering, Placement, Share


def place_checked(facts: Sequence[NodeFacts], job: Job) -> Placement:
    """As :func:`place`; StartError if versions on the hosts do not work together."""
    if (conflict := versions.conflict(job.versions, facts)) is not None:
        raise StartError(conflict)
    return place(facts, job)


def place(facts: Sequence[NodeFacts], job: Job) -> Placement:
    """Merge the tasks of each executor into one node, and number nodes and ranks as torchrun does.

    Nodes are in the order of their lowest partition; with ``local_ranks="host"``, nodes of a host follow each other.
    ResourceError if ranks would share a GPU, or if a task has too few or cannot see its own.
    """
    by_executor: dict[str, list[NodeFacts]] = {}
    by_host = job.training.local_ranks == "host"
    for fact in _ordered(facts, by_host=by_host):
        by_executor.setdefault(fact.executor, []).append(fact)
    nodes: list[Node] = []
    first_rank = 0
    for node_rank, tasks in enumerate(by_executor.values()):
        lead = tasks[0]
        slots = len(tasks) * job.ranks_per_task
        ranks = slots if not job.launch.once else int(node_rank == 0)
        node = Node(
            node_rank=node_rank,
            executor=lead.executor,
            host=lead.host,
            address=lead.address,
            port=lead.port,
            leader=lead.partition,
            first_rank=first_rank,
            local_world_size=ranks,
            gpus=_node_gpus(tasks, job) if job.resources.use_gpu else (),
            task_cpus=lead.cpus,
            ports=tuple(port for task in tasks for port in task.ports),
            slots=slots,
        )
        nodes.append(node)
        first_rank += ranks
    _refuse_shared_gpus(nodes, [tasks[0].machine or tasks[0].executor for tasks in by_executor.values()])
    if by_host:
        nodes = _numbered_by_host(nodes, [_host(tasks[0]) for tasks in by_executor.values()])
    return Placement(tuple(nodes))


def _ordered(facts: Sequence[NodeFacts], *, by_host: bool) -> list[NodeFacts]:
    """Sort tasks by partition; with ``by_host``, those of a host follow each other."""
    ordered = sorted(facts, key=lambda fact: fact.partition)
    if not by_host:
        return ordered
    first = {_host(fact): fact.partition for fact in reversed(ordered)}
    return sorted(ordered, key=lambda fact: (first[_host(fact)], fact.partition))


def _host(fact: NodeFacts) -> str:
    """Return what all tasks of a host share; the executor if the host is not known."""
    return fact.mounts or fact.executor


def _numbered_by_host(nodes: Sequence[Node], hosts: Sequence[str]) -> list[Node]:
    """Number the ranks of each host together, from 0; ``nodes`` are grouped by host."""
    sizes = Counter[str]()
    for node, host in zip(nodes, hosts):
        sizes[host] += node.local_world_size
    numbers, before = {host: number for number, host in enumerate(sizes)}, Counter[str]()
    numbered = []
    for node, host in zip(nodes, hosts):
        numbering = Numbering(numbers[host], len(sizes), before[host], sizes[host])
        before[host] += node.local_world_size
        numbered.append(replace(node, by_host=numbering))
    return numbered


def with_port(placement: Share, port: int) -> Share:
    """Return the placement of another attempt, whose ranks meet at another port of node 0."""
    master = replace(placement.master, port=port)
    node = master if placement.node == placement.master else placement.node
    return replace(placement, node=node, master=master, nodes=(master, *placement.nodes[1:]) if placement.nodes else ())


def _node_gpus(tasks: Sequence[NodeFacts], job: Job) -> tuple[str, ...]:
    """Return the devices of a node, in the order in which its ranks see them."""
    by_rank: list[tuple[str, ...]] = []
    needed = job.ranks_per_task * job.resources.gpus_each
    for task in tasks:
        visible = devices.parse_visible(task.visible_devices)
        mapped = devices.through_mapping(task.gpus, visible, task.host)
        if len(mapped) < needed:
            raise ResourceError(
                f"task {task.partition} on {task.host} has {count(len(mapped), 'GPU')} "
                f"({', '.join(mapped) or 'none'}), but runs {count(job.ranks_per_task, 'rank')} with "
                f"{count(job.resources.gpus_each, 'GPU')} each: set spark.task.resource.gpu.amount to the number of "
                "GPUs that one task needs"
            )
        by_rank += [
            mapped[first : first + job.resources.gpus_each] for first in range(0, needed, job.resources.gpus_each)
        ]
    gpus = tuple(gpu for turn in zip(*by_rank) for gpu in turn)
    if len(gpus) > 1 and (migs := [gpu for gpu in gpus if gpu.startswith("MIG-")]):
        raise ResourceError(
            f"the ranks on {tasks[0].host} have {', '.join(migs)}, but CUDA shows a process one MIG device: start one "
            "rank with one device on each executor, or use whole GPUs"
        )
    return gpus


def _refuse_shared_gpus(nodes: Sequence[Node], machines: Sequence[str]) -> None:
    """ResourceError if ranks would share a GPU: NCCL's first collective would hang, or memory run out."""
    owners: dict[tuple[str, str], int] = {}
    for node, machine in zip(nodes, machines):
        for index, gpu in enumerate(node.gpus):
            rank = node.first_rank + index % node.slots
            device = (machine if gpu.isdecimal() else "", gpu)  # a number is unique only on one machine
            if device in owners:
                raise ResourceError(
                    f"ranks {owners[device]} and {rank} on {node.host} would share GPU {gpu}: give each task whole "
                    "GPUs of its own (spark.task.resource.gpu.amount=1, and a discovery script that lists each GPU "
                    "once)"
                )
            owners[device] = rank
