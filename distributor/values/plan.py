"""What one node does in a run, and the orders to its agent, launcher, ranks and companions."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distributor.values.checkpoints import SharedMemory
from distributor.values.job import Job, Target
from distributor.values.placement import Node, Share


@dataclass(frozen=True)
class Site:
    """What is known about a node when its plan is made."""

    job: Job
    placement: Share
    base_env: Mapping[str, str] = field(default_factory=dict, repr=False)  # what the user has set for the task
    sockets: Mapping[str, str] = field(default_factory=dict)  # select the network interface between ranks
    folder: str = ""  # the node's private one, where ranks find files
    attempt: int = 0
    memory: SharedMemory | None = None  # None: ranks keep no states there

    @property
    def node(self) -> Node:
        return self.placement.node


@dataclass(frozen=True)
class Call:
    """A function in ``distributor`` that ranks call with these arguments and their own ``local_rank``."""

    module: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Companion:
    """A process beside the ranks of a node, such as Ray. The agent starts it before the ranks and ends it after them.

    The process calls ``function(**arguments, ready=ready)``. The function calls ``ready()`` when ranks may begin, and
    runs until SIGTERM ends it. If it ends before it has called ``ready()`` or while ranks run, the attempt fails.

    Example:
        >>> Companion("head", "distributor.launch.ray.node", "serve", {"port": 6379}).name
        'head'
    """

    name: str  # in errors and names of files; unique on the node
    module: str  # of this package, or any that can be imported on the node
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # on top of the node's


@dataclass(frozen=True)
class CompanionOrder:
    """An agent's order to a companion."""

    companion: Companion
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What one node will do, decided without side effects."""

    node: Node
    target: Target
    node_env: Mapping[str, str | None] = field(repr=False)  # of the launcher, on top of the task's; None removes
    rank_env: tuple[Mapping[str, str], ...] = field(repr=False)  # by local rank, on top of node_env
    files: Mapping[str, str] = field(default_factory=dict, repr=False)  # texts by name, for the node's private folder
    elsewhere: tuple[str, ...] = ()  # what ranks and companions leave outside it; removed after each attempt
    first: Call | None = None  # each rank calls it before the target
    last: Call | None = None  # each rank calls it after the target and exit callbacks
    keep_memory: bool = False  # the C library of ranks keeps freed memory for the next training step
    companions: tuple[Companion, ...] = ()
    serving: tuple[int, ...] = ()  # of the whole run: never end by themselves, but once all others have succeeded

    @property
    def serving_here(self) -> frozenset[int]:
        """The local ranks of this node that serve others, such as TensorFlow's parameter servers."""
        return frozenset(rank - self.node.first_rank for rank in self.serving if rank in self.node.ranks)


@dataclass(frozen=True)
class NodeOrder:
    """What a launcher and its ranks do, and with which files."""

    run_id: str
    plan: Plan
    placement: Share
    grace_period: float
    start_timeout: float
    store_fd: int | None  # listening socket for the rendezvous store on node 0; None on others
    event_fd: int  # pipe to the agent
    folder: str  # the node's private one
    cwd: str | None  # of the ranks; None leaves it
    sys_path: tuple[str, ...]
    collect_all: bool  # all ranks send their return values, not only rank 0
    start_method: Literal["fork", "spawn"]
    root: str  # from where distributor can be imported
    environ: Mapping[str, str] = field(repr=False)  # the launcher's whole one
    spare_fd: int | None = None  # on which a spare, a fork of the launcher, waits for the next attempt's order
    slots_fd: int = -1  # memory in which ranks report how they ended: channel/rank_slots.py
    imported: mmap.mmap | None = None  # a byte for each rank, which the spare reads: rank/slow_import.py
    require_group: bool | None = None
    tracked: str | None = None  # as in Job
    gpu_check: Call | None = None  # first call of each rank: raises if it does not see its GPUs
    check: Call | None = None  # next call: raises if the run cannot begin

    @property
    def host(self) -> str:
        return self.plan.node.host


@dataclass(frozen=True)
class Endpoint:
    """Where nodes reach the driver. They accept only this certificate, and the driver only this token."""

    host: str
    port: int
    certificate: str = field(repr=False)  # PEM
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class AgentOrder:
    """An order to an agent from its *owner*: the Spark task that starts it or, in local mode, the driver."""

    job: bytes = field(repr=False)  # the pickled Job
    executor: str  # this node's, as in facts
    placed: list[dict[str, Any]]  # the driver's answer, encoded: Placed, perhaps AllNodes; empty: placed from facts
    facts: list[dict[str, Any]]  # of all tasks, as dicts of NodeFacts; empty if the driver has placed the ranks
    folder: str  # the node's private one; the agent removes it
    root: str  # from where distributor can be imported
    sys_path: list[str]  # the owner's
    endpoint: tuple[str, int, str, bytes] | None = field(repr=False)  # None: a socket is inherited, or none
    on_driver: bool  # local mode: scripts and folders are used in place, where executors use copies
    reached: bool = False  # this node's task has already reached the driver
    in_place: bool = False  # the owner's current directory is the driver's: ranks' files may stay there
    times: dict[str, float] = field(default_factory=dict)  # before the agent started, in seconds since the epoch
    note: str | None = None  # a warning for the user
    spark_executor: int | None = None  # its pid; None in local mode
    parts: dict[str, bytes] = field(default_factory=dict, repr=False)  # of the job, sent separately
    secret: str = field(default="", repr=False)  # proves that this is the node: channel/proof.py; unknown to ranks
