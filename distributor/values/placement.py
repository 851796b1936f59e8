"""Which rank runs where: the facts about tasks, and the nodes that the tasks form."""

# Annotations are evaluated here, since the codec of values/messages.py reads them, also in Spark's workers.

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributor.text.wording import who
from distributor.values.codec import Count, Name

_MOST_OTHERS = 16


@dataclass(frozen=True)
class NodeFacts:
    """What is known of one Spark task (in local mode, one rank), from which the placement is computed."""

    partition: Count  # index of the barrier task; in local mode, the rank
    executor: Name  # its tasks form one node
    host: Name  # to show to users
    address: Name  # IP address at which other nodes reach the machine
    port: int  # on which the task listens: of the rendezvous store, if this becomes node 0
    gpus: tuple[Name, ...] = ()  # addresses of those that Spark gave, or that local mode found
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES, or AMD's HIP_VISIBLE_DEVICES
    cpus: int = 1  # of the task; in local mode, of one rank
    versions: Mapping[Name, Name] = field(default_factory=dict)  # of Python, torch and the path's packages
    machine: str = ""  # or container, in which device numbers mean the same; "" compares within the executor
    mounts: str = ""  # tasks with the same value see the same files; "" if not known
    ports: tuple[int, ...] = ()  # reserved for the launch path


@dataclass(frozen=True)
class Numbering:
    """From where ranks of a node get ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK``."""

    group_rank: int  # of the node, or of the host if ranks are numbered by host
    groups: int  # nodes, or hosts
    first_local: int  # LOCAL_RANK of the node's first rank
    local_world_size: int  # of the node, or of the host


@dataclass(frozen=True)
class Node:
    """One executor (or, in local mode, this machine), with a contiguous block of ranks under one agent.

    Attributes:
        executor, host, address, port: as in ``NodeFacts``, for the task that runs the node's agent.
        leader: the partition of this task.
        first_rank, local_world_size: the node's first rank, and the number of its ranks.
        gpus: the GPUs in the order in which ranks see them: the first GPU of each rank, then the second GPU of each
            rank, and so on. A rank uses the GPU at index ``LOCAL_RANK`` and every ``local_world_size``-th GPU after it.
        task_cpus: number of CPUs of one task.
        by_host: the numbering of the node's ranks if all ranks of a host are numbered together; otherwise ``None``.
        ports: ports that are reserved for the launch path (the way in which ranks are started). A server that sets
            ``SO_REUSEADDR`` can listen on these ports.
        slots: number of the run's processes (``num_processes``) that belong to the node. It is the number of ranks,
            unless the launch path runs the target only once.
    """

    node_rank: int
    executor: Name
    host: Name
    address: Name
    port: int
    leader: int
    first_rank: int
    local_world_size: int
    gpus: tuple[Name, ...] = ()
    task_cpus: int = 1
    by_host: Numbering | None = None
    ports: tuple[int, ...] = ()
    slots: int = 0

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.local_world_size)


@dataclass(frozen=True)
class Placement:
    """Which rank runs where: the nodes, in the order of their node ranks. All nodes of a run share one placement."""

    nodes: tuple[Node, ...]

    @property
    def world_size(self) -> int:
        return sum(node.local_world_size for node in self.nodes)

    @property
    def master(self) -> Node:
        return self.nodes[0]

    def node_of(self, executor: str) -> Node:
        """Return the node of an executor."""
        return next(node for node in self.nodes if node.executor == executor)

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's machine, or ``"?"`` if there is no such rank."""
        index = bisect_right(self.nodes, rank, key=lambda node: node.first_rank) - 1
        return next((node.host for node in self.nodes[max(0, index) : index + 1] if rank in node.ranks), "?")

    def text(self) -> str:
        """Return the nodes as JSON, the same for equal placements."""
        return json.dumps([vars(node) for node in self.nodes], default=vars)

    def shares(self, *, whole: bool) -> tuple["Share", ...]:
        """Return what each node knows of this placement; ``whole`` includes all nodes."""
        addresses = tuple(dict.fromkeys(node.address for node in self.nodes))
        common: dict[str, Any] = {
            "master": self.master,
            "count": len(self.nodes),
            "world_size": self.world_size,
            "digest": digest(self.text()),
            "even": len({_group_size(node) for node in self.nodes}) == 1,
            "others": addresses[:: -(-len(addresses) // _MOST_OTHERS)],
            "nodes": self.nodes if whole else (),
        }
        on_host = Counter(node.host for node in self.nodes)
        return tuple(Share(node, beside=on_host[node.host], **common) for node in self.nodes)

    def __str__(self) -> str:
        return "; ".join(self._lines())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show a node per line as the value of a notebook's cell."""
        for line in self._lines():
            printer.text(line)
            printer.break_()

    def _lines(self) -> Iterator[str]:
        for n in self.nodes:
            ranks = who(n.ranks) if n.ranks else "no rank"
            yield f"node {n.node_rank} on {n.host} ({n.address}): {ranks}" + (
                f", GPUs {','.join(n.gpus)}" if n.gpus else ""
            )


@dataclass(frozen=True)
class Share:
    """What a node knows of the placement: its own part, node 0, and what holds for all nodes."""

    node: Node  # this node
    master: Node  # node 0
    count: int  # of nodes
    world_size: int
    digest: str  # of the placement, the same on all nodes
    beside: int = 1  # number of nodes on this host
    even: bool = True  # all nodes have as many ranks; all hosts, if ranks are numbered by host
    others: tuple[str, ...] = ()  # addresses of nodes, from which a node learns the interface towards all
    nodes: tuple[Node, ...] = ()  # all, if the launch path has ``all_nodes``

    @property
    def numbering(self) -> Numbering:
        """The numbers from which the node's ranks get ``LOCAL_RANK``, ``GROUP_RANK`` and similar variables."""
        return self.node.by_host or Numbering(self.node.node_rank, self.count, 0, self.node.local_world_size)

    @property
    def all_have_ranks(self) -> bool:
        """Whether no node is without ranks, as all nodes but one are if the target runs only once."""
        return self.world_size >= self.count


def digest(text: str) -> str:
    """Return the digest of a placement, by which nodes and the driver compare theirs, from its text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _group_size(node: Node) -> int:
    return node.local_world_size if node.by_host is None else node.by_host.local_world_size


def host_in(executor: str) -> str:
    """Return the host in the name of an executor. Spark names an executor by its host and a port.

    >>> host_in("host-a:4000"), host_in("[fd00::1]:4000")
    ('host-a', '[fd00::1]')
    """
    return executor.rpartition(":")[0]
