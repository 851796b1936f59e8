"""From the facts of all tasks to who runs where: pure functions, the same answer on every node."""

from __future__ import annotations

from collections.abc import Sequence

from distributor import devices
from distributor.errors import ResourceError
from distributor.job import Job, Node, NodeFacts, Placement


def place(facts: Sequence[NodeFacts], job: Job) -> Placement:
    """Merges tasks of one executor into one node and numbers nodes and ranks.

    Nodes are ordered by their lowest partition; ranks are contiguous on a node, so
    ``RANK = (ranks of the nodes before) + LOCAL_RANK`` as torchrun numbers them.

    Args:
        facts: one entry per task, in any order.
        job: for the ranks per task and whether GPUs are wanted.

    Raises:
        ResourceError: two ranks would share a device, or a task has fewer GPUs than ranks.
    """
    by_executor: dict[str, list[NodeFacts]] = {}
    for fact in sorted(facts, key=lambda fact: fact.partition):
        by_executor.setdefault(fact.executor, []).append(fact)
    nodes: list[Node] = []
    first_rank = 0
    for node_rank, tasks in enumerate(by_executor.values()):
        lead = tasks[0]
        ranks = len(tasks) * job.ranks_per_task
        node = Node(
            node_rank=node_rank,
            executor=lead.executor,
            host=lead.host,
            address=lead.address,
            port=lead.port,
            leader=lead.partition,
            first_rank=first_rank,
            local_world_size=ranks,
            gpus=_node_gpus(tasks, job.ranks_per_task) if job.use_gpu else (),
            task_cpus=lead.cpus,
        )
        nodes.append(node)
        first_rank += ranks
    return Placement(tuple(nodes))


def _node_gpus(tasks: Sequence[NodeFacts], ranks_per_task: int) -> tuple[str, ...]:
    """The devices of a node's ranks, in order of local rank."""
    gpus: list[str] = []
    for task in tasks:
        visible = devices.parse_visible(task.visible_devices)
        mapped = devices.through_mapping(task.gpus, visible, task.host)
        if len(mapped) < ranks_per_task:
            raise ResourceError(
                f"task {task.partition} on {task.host} runs {ranks_per_task} ranks, but has {len(mapped)} GPUs "
                f"({', '.join(mapped) or 'none'}): set spark.task.resource.gpu.amount to the GPUs of one task"
            )
        gpus += mapped[:ranks_per_task]
    for local_rank, gpu in enumerate(gpus):
        twin = gpus.index(gpu)
        if twin != local_rank:
            raise ResourceError(
                f"local ranks {twin} and {local_rank} on {tasks[0].host} would share GPU {gpu}: give each task "
                "a whole GPU of its own (spark.task.resource.gpu.amount=1 and a discovery script that names each once)"
            )
    return tuple(gpus)
