"""Every message between the processes of a run, and its form on the wire: a dict of its ``kind`` and its fields.

JSON goes to the driver, between nodes, and between an agent and its launcher. Pickle goes over other sockets of one
user on one machine, since these messages can hold bytes. :func:`decode` checks each value and its bounds on arrival. A
rank's output is no message, but a :class:`~distributor.values.outcome.Log`.

This module is pickled by value for Spark's workers: it imports only what they have, and modules that do the same.
"""

# Annotations are evaluated here, since :func:`decode` reads them.

import dataclasses
import reprlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from distributor.values import codec
from distributor.values.codec import Between, Count, Length, Name, Port, Seconds, Text
from distributor.values.files import Entry, RelativePath
from distributor.values.outcome import UNCAUGHT, Failure, NodeReport, Outcome
from distributor.values.placement import Node, NodeFacts, Share

M = TypeVar("M", bound="Message")

#: How much of a rank's output to one stream the driver has received: rank, number of the stream, number of bytes.
Offset = tuple[int, int, int]


@dataclass(frozen=True)
class Message:
    """The base class of all messages."""


@dataclass(frozen=True, kw_only=True)
class AttemptMessage(Message):
    """A node's message about one attempt. It may come again after a break, so the driver ignores it in another one."""

    attempt: Count  # from 0


_KINDS: dict[str, type[Message]] = {}


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def _message(kind: type[M]) -> type[M]:
    """Make a class a frozen dataclass that :func:`decode` knows."""
    _KINDS[kind.__name__] = dataclass(frozen=True)(kind)
    return kind


# From a task or an agent to the driver, before the node's ranks start.


@_message
class TaskFacts(Message):
    """A barrier task's facts, such as its address and GPUs."""

    stage_attempt: Name  # the tasks that Spark started together
    attempt: Count  # Spark's number of this task attempt
    held: Name  # of the socket at which siblings wait for this task's end
    facts: NodeFacts

    @property
    def partition(self) -> int:
        return self.facts.partition


@_message
class Importing(Message):
    """A node is importing a module before its ranks start. If ``module`` is empty, the node has finished importing."""

    node: Name
    nodes: Count  # of the run
    module: Name


# From a node to the driver, each as the first message of a connection of its own.


@_message
class Upload(Message):
    """A node announces a file that a rank wrote. It sends the file's bytes after the driver's :class:`Proceed`.

    The driver answers :class:`Received` once it has the file, or at once if it has the same bytes; or :class:`Refused`.
    """

    entry: Entry
    uploaded: RelativePath | None = None  # temporary name at the URL output_dir, where the file is: no bytes follow
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@_message
class Delete(Message):
    """Ranks have removed a file, and the driver is to remove the node's copy. The same bytes of another node stay."""

    path: RelativePath
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@_message
class Fetch(Message):
    """A node asks for all files in ``output_dir`` before its ranks start: an :class:`Offer` and bytes for each."""

    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@_message
class Value(Message):
    """A node announces a rank's return value of ``size`` bytes, and sends it after the driver's :class:`Proceed`."""

    rank: int
    size: int
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


#: Maximum bytes of a report that a task sends over the channel.
LARGEST_REPORT = 64 << 20


@_message
class FailedReport(Message):
    """A task announces the report of its node in a failed run, and sends its bytes at once.

    Without ``size``, the report comes through Spark only. The driver answers nothing, and ends the connection once the
    task need not keep the Spark job running.
    """

    nodes: Count  # of the run
    size: Annotated[int, Between(0, LARGEST_REPORT)] = 0
    node: Name = ""
    secret: Name = dataclasses.field(default="", repr=False)


@_message
class HeldStates(Message):
    """A connection that stays open until the run ends. So long, the node may keep states in memory for the next job."""

    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


# From a rank to the agent of another node.


@_message
class Copy(Message):
    """A rank announces its state to the agent of another node, which keeps a copy in memory.

    The agent answers :class:`Proceed` or, without room, :class:`Refused`; :class:`Received` follows three files.
    """

    slot: str  # name of the file of tensors
    record: int  # bytes of the description of the state
    objects: int  # bytes of pickled objects
    tensors: int  # bytes


@_message
class Recall(Message):
    """A rank asks for parts of a rank's state that another node keeps in shared memory; :class:`Proceed` precedes."""

    path: str  # on the node that is asked
    parts: tuple[tuple[int, int], ...]  # offset in the file, and number of bytes


# From a node to the driver.


@_message
class Hello(Message):
    """The first message of a node's main connection. From then on, no other process can pretend to be this node."""

    node: Name
    digest: Name = ""  # of the placement; empty: the task connects, since the agent has died or could not start
    placement: str = ""  # Placement.text, if nodes have computed it themselves
    secret: Name = dataclasses.field(default="", repr=False)  # known to the node's task and agent only


@_message
class Started(AttemptMessage):
    """The node has started its ranks."""


@_message
class Beat(Message):
    """A heartbeat of a node."""

    alive: Count  # ranks that are running
    idle: Seconds | None = None  # seconds for which all of them have been idle; None: not measured, or none is running


@_message
class StackDump(Message):
    """The Python stacks of one rank, or why they are missing: an answer to the :class:`Dump` with the same number."""

    number: Count
    rank: Count
    text: Annotated[str, Length(512 << 10)]


@_message
class Warnings(Message):
    """A node's warnings, to show to the user; each text completes the sentence "the node on HOST ..."."""

    host: Name
    texts: tuple[str, ...]


@_message
class SystemMetrics(Message):
    """The load of a node, by MLflow's names."""

    time: float  # seconds since the epoch
    values: Annotated[Mapping[Name, float], Length(512)]


@_message
class Skipped(Message):
    """A node leaves out lines of a rank's output, since it cannot send lines as fast as the rank writes them."""

    rank: Count
    stream: Annotated[int, Between(1, UNCAUGHT)]
    lines: Count
    offset: Count  # of the output that the node sends next, in the rank's stream


@_message
class Failed(AttemptMessage):
    """A rank failed, or the node failed in another way: for example, it could not start its ranks."""

    failure: Failure | None = None  # of a rank, if one failed
    age: float = 0.0  # seconds from the rank's failure to this message


@_message
class Stopped(AttemptMessage):
    """The node's attempt has ended without success. All its ranks have ended, and it can begin another attempt."""

    port: Port  # listens on the node's address, for the next rendezvous store if this is node 0
    outcomes: tuple[Outcome, ...]  # without exceptions; if too long, without tracebacks and output, or even failures
    error: tuple[str, str] | None = None  # as in NodeReport


@_message
class Finished(Message):
    """All ranks of the node have succeeded. On Spark, the task also returns ``report``, unless Spark fails."""

    report: NodeReport
    values: tuple[tuple[int, str], ...] = dataclasses.field(default=(), repr=False)  # rank, base64
    following: tuple[int, ...] = ()  # ranks whose values come as Value


@_message
class Keeping(Message):
    """The node's ranks have ended. ``bringing`` says whether the node is still copying new files to ``output_dir``."""

    bringing: bool


@_message
class Reached(AttemptMessage):
    """A node's answer to the :class:`Propose` with the same number: whether its ranks can stop at the proposed step."""

    number: Count
    accepted: bool  # no rank had reached the step; ranks that do wait there for the decision
    step: Annotated[
        int, Between(-1, 2**63 - 1)
    ]  # the highest that a rank has passed to runtime.should_stop; -1: none has called it


@_message
class RankPreempted(AttemptMessage):
    """A rank or, without ``rank``, the node got SIGTERM. Its ranks go on until all ranks stop together at one step."""

    rank: Count | None = None


@_message
class Halted(AttemptMessage):
    """A call of ``runtime.should_stop`` told a rank to stop at a step."""

    rank: Count
    step: Count


#: The messages of a node while all ranks agree on a step at which they stop.
Halting = Reached | RankPreempted | Halted


@_message
class UnfitNode(Message):
    """A task's node cannot create a private folder, and therefore has no agent."""

    host: Name
    why: Text


@_message
class Dead(Message):
    """A task reports that its node's agent has died."""


@_message
class Orphaned(Message):
    """An agent's owner has ended too early. The node counts as lost unless it ``lives`` on."""

    lives: bool  # its ranks have succeeded, or are about to stop together


@_message
class Bye(Message):
    """The last message on a node's main connection to the driver."""


# From the driver to tasks and nodes.


@_message
class Placed(Message):
    """The answer to :class:`TaskFacts`: what the task must know of the others before it starts its agent."""

    leader: str  # what the task that leads this executor has as TaskFacts.held
    share: Share | None = None  # of the task's node; None if agents compute the placement themselves
    warnings: tuple[str, ...] = ()  # of the node
    all_nodes: bool = False  # AllNodes follows


@_message
class AllNodes(Message):
    """The nodes of the run, in the order of their node ranks: the same bytes for all tasks."""

    nodes: tuple[Node, ...]


@_message
class Gather(Message):
    """Some tasks cannot reach the driver, so all tasks must exchange facts through Spark."""


@_message
class Proceed(Message):
    """The answer to a message that announces bytes or asks for bytes: the bytes may follow."""


@_message
class Received(Message):
    """The last answer to a request: the announced bytes or all files have arrived, or the node's copy is gone."""


@_message
class Offer(Message):
    """The answer to :class:`Fetch`, once for each file. The file's bytes follow."""

    path: str
    size: int
    mode: int
    mtime_ns: int


@_message
class Refused(Message):
    """The answer to :class:`Upload`, :class:`Copy` or :class:`Recall` if the request is refused; ``why`` says why."""

    why: str


@_message
class Welcome(Message):
    """The driver's answer to :class:`Hello`: how much of the output of the node's ranks the driver has received."""

    offsets: tuple[Offset, ...]


@_message
class BeatHeard(Message):
    """The driver's answer to :class:`Beat`: how much of the output of the node's ranks the driver has received."""

    offsets: tuple[Offset, ...]


@_message
class Farewell(Message):
    """The answer to :class:`Bye`, once the driver has received everything.

    Also sent to nodes that are connected when the job ends, and to a process whose :class:`Hello` comes too late.
    """

    offsets: tuple[Offset, ...]
    failed: bool  # the driver has stopped the run


@_message
class Stop(Message):
    """The driver orders a node to stop its ranks: with SIGTERM, and with SIGKILL after the grace period.

    Also the answer to :class:`TaskFacts` of a task that must not begin, and to :class:`Value` if the run was stopped.
    """

    reason: str
    grace: bool = True  # False: kill at once, even if a grace period has begun
    hasty: bool = False  # another attempt waits: SIGKILL for each rank as soon as it writes no file


@_message
class Terminate(Message):
    """The driver, which got SIGTERM, orders a node to do as if it had got SIGTERM itself."""


@_message
class Begin(Message):
    """The driver orders a node to start its ranks again."""

    attempt: int  # from 0
    port: int  # of node 0, where the ranks of all nodes meet


@_message
class End(Message):
    """The driver tells a node that its ranks will not be started again in this job."""


@_message
class Propose(Message):
    """The driver proposes that all ranks stop at ``step``. A node accepts if none of its ranks has reached it."""

    number: int  # grows with each proposal of an attempt
    step: int
    attempt: int = 0


@_message
class Agree(Message):
    """All nodes have accepted the proposal with this number, so the ranks stop at ``step``."""

    number: int
    step: int
    attempt: int = 0


@_message
class Dump(Message):
    """The driver asks a node for the stacks of its ranks."""

    number: int
    all_threads: bool  # or the main threads only
    timeout: float  # seconds within which the node must answer


# From an agent to a launcher that has imported torch and waits to start ranks.


@_message
class StartRanks(Message):
    """Start the ranks as described in the file ``path``, a pickled :class:`~distributor.values.plan.NodeOrder`."""

    path: str
    names: tuple[str, ...]  # what each file descriptor is for that comes with the message


# From the launcher to its agent. A field ``time`` is in seconds since the epoch.


@_message
class LauncherReady(Message):
    """The launcher has imported torch and has read its order."""

    time: float


@_message
class RanksStarted(Message):
    """All ranks of the node have been started."""

    pids: tuple[int, ...]  # by local rank
    time: float


@_message
class RankExited(Message):
    """A rank's process has ended. Times are ``time.monotonic()``, a clock that all processes of the host share."""

    local_rank: int
    code: int  # of a signal, if negative
    stopped: float | None  # when the launcher began to stop the rank
    moment: float  # when the process ended
    released: float | None = None  # when it was told to end, since it only served ranks that succeeded: code is 0
    early: bool = False  # left with code 0 although its function has not returned

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and not self.early


@_message
class Terminated(Message):
    """The launcher got SIGTERM from outside, as all processes of the node may have."""


@_message
class AllPassed(Message):
    """The ranks of all nodes have succeeded: all launchers have reached the exit barrier of torch's elastic agent."""


@_message
class LauncherWarning(Message):
    """A warning for the user; ``text`` completes the sentence "the node on HOST ..."."""

    text: str


@_message
class LauncherFailed(Message):
    """The launcher has failed with an exception."""

    message: str
    traceback: str


# From an owner to a warm process, and from an agent to its owner: pickled, over private connections.


@_message
class Fork(Message):
    """A request to a warm process to fork a part of this package. ``owner`` is the pid of the process that asks.

    Its file descriptors are the fork's current directory, standard output and error, and the files ``names``.
    """

    part: str
    names: tuple[str, ...]
    owner: int
    environ: dict[str, str] = dataclasses.field(repr=False)  # the fork's
    arguments: tuple[str, ...] = ()


@_message
class Retire(Message):
    """An order to a warm process: accept no more requests, and end once all processes that it has forked have ended."""


@dataclass(frozen=True)
class Rest:
    """The part of a rank's output that the driver does not have: everything in the file ``path`` from ``offset`` on."""

    rank: int
    stream: int
    path: str
    offset: int
    base: int = 0  # offset of the file's first byte


@dataclass(frozen=True)
class Sent:
    """A return value that the driver has received over the channel."""

    size: int  # bytes
    digest: bytes  # sha256


@dataclass(frozen=True)
class FileLeft:
    """A new file that a rank has written, and of which the driver does not know yet."""

    entry: Entry
    source: str | None  # path on the node; None if the node has uploaded the file
    uploaded: str | None = None  # temporary name at the URL output_dir


@_message
class NodeResult(Message):
    """All results of a node, which the agent sends to its owner for the driver."""

    report: bytes = dataclasses.field(repr=False)  # the pickled NodeReport
    values: dict[int, bytes | str | Sent] = dataclasses.field(repr=False)  # or a file's path
    rest: tuple[Rest, ...]  # reports and output that the channel did not bring
    failed: bool  # as far as the agent knows
    files: tuple[FileLeft, ...] = ()  # that the channel did not bring
    node_rank: int = -1
    cut: bool = False  # the channel has broken for good


def encode(message: Message) -> dict[str, Any]:
    """Return a message as a dict of its kind and fields, with nested dataclasses as dicts and tuples as lists.

    >>> encode(Beat(2))
    {'kind': 'Beat', 'alive': 2, 'idle': None}
    """
    return {"kind": type(message).__name__, **codec.plain(message)}


def decode(values: Any) -> Message:
    """Return the message that :func:`encode` has turned into the dict ``values``; ValueError if there is none.

    >>> decode({"kind": "Beat", "alive": 2, "idle": 0.5})
    Beat(alive=2, idle=0.5)
    """
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"there is no message of kind {reprlib.repr(kind)}")
    message: Message = codec.build(_KINDS[kind], {name: value for name, value in values.items() if name != "kind"})
    return message
