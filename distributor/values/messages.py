"""Every message between the processes of a run, and its form on the wire: a dict of its ``kind`` and its fields.

JSON goes to the driver, between nodes, and between an agent and its launcher. Pickle goes over other sockets of one
user on one machine, since these messages can hold bytes. :func:`decode` checks each value on arrival. A rank's output
is no message, but a :class:`~distributor.values.outcome.Log`.

This module is pickled by value for Spark's workers: it imports only what they have, and modules that do the same.
"""

# Annotations are evaluated here, since :func:`decode` reads them.

import dataclasses
import reprlib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from distributor.values.files import Entry
from distributor.values.outcome import Failure, NodeReport, Outcome
from distributor.values.placement import Node

M = TypeVar("M", bound="Message")

#: How much of a rank's output to one stream the driver has received: rank, number of the stream, number of bytes.
Offset = tuple[int, int, int]


@dataclass(frozen=True)
class Message:
    """The base class of all messages."""


# From a task or an agent to the driver, before the node's ranks start.


@dataclass(frozen=True)
class TaskFacts(Message):
    """A barrier task's facts, such as its address and GPUs."""

    stage_attempt: str  # the tasks that Spark started together
    attempt: int  # Spark's number of this task attempt
    partition: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Importing(Message):
    """A node is importing a module before its ranks start. If ``module`` is empty, the node has finished importing."""

    node: str
    nodes: int  # of the run
    module: str


# From a node to the driver, each as the first message of a connection of its own.


@dataclass(frozen=True)
class Upload(Message):
    """A node announces a file that a rank wrote. It sends the file's bytes after the driver's :class:`Proceed`.

    The driver answers :class:`Received` once it has the file, or at once if it has the same bytes; or :class:`Refused`.
    """

    entry: Entry
    uploaded: str | None = None  # temporary name at the URL output_dir, where the file is: no bytes follow
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Delete(Message):
    """Ranks have removed a file, and the driver is to remove the node's copy. The same bytes of another node stay."""

    path: str
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Fetch(Message):
    """A node asks for all files in ``output_dir`` before its ranks start: an :class:`Offer` and bytes for each."""

    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Value(Message):
    """A node announces a rank's return value of ``size`` bytes, and sends it after the driver's :class:`Proceed`."""

    rank: int
    size: int
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class FailedReport(Message):
    """A task announces the report of its node in a failed run, and sends its bytes at once.

    Without ``size``, the report comes through Spark only. The driver answers nothing, and ends the connection once the
    task need not keep the Spark job running.
    """

    nodes: int  # of the run
    size: int = 0
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class HeldStates(Message):
    """A connection that stays open until the run ends. So long, the node may keep states in memory for the next job."""

    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


# From a rank to the agent of another node.


@dataclass(frozen=True)
class Copy(Message):
    """A rank announces its state to the agent of another node, which keeps a copy in memory.

    The agent answers :class:`Proceed` or, without room, :class:`Refused`; :class:`Received` follows three files.
    """

    slot: str  # name of the file of tensors
    record: int  # bytes of the description of the state
    objects: int  # bytes of pickled objects
    tensors: int  # bytes


@dataclass(frozen=True)
class Recall(Message):
    """A rank asks for parts of a rank's state that another node keeps in shared memory; :class:`Proceed` precedes."""

    path: str  # on the node that is asked
    parts: tuple[tuple[int, int], ...]  # offset in the file, and number of bytes


# From a node to the driver.


@dataclass(frozen=True)
class Hello(Message):
    """The first message of a node's main connection. From then on, no other process can pretend to be this node."""

    node: str
    placement: tuple[Node, ...] = ()  # empty: the task connects, since the agent has died or could not start
    secret: str = dataclasses.field(default="", repr=False)  # known to the node's task and agent only


@dataclass(frozen=True)
class Started(Message):
    """The node has started its ranks."""


@dataclass(frozen=True)
class Beat(Message):
    """A heartbeat of a node."""

    alive: int  # ranks that are running
    idle: float | None = None  # seconds for which all of them have been idle; None: not measured, or none is running


@dataclass(frozen=True)
class StackDump(Message):
    """The Python stacks of one rank, or why they are missing: an answer to the :class:`Dump` with the same number."""

    number: int
    rank: int
    text: str


@dataclass(frozen=True)
class Warnings(Message):
    """A node's warnings, to show to the user; each text completes the sentence "the node on HOST ..."."""

    host: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Skipped(Message):
    """A node leaves out lines of a rank's output, since it cannot send lines as fast as the rank writes them."""

    rank: int
    stream: int
    lines: int
    offset: int  # of the output that the node sends next, in the rank's stream


@dataclass(frozen=True)
class Failed(Message):
    """A rank failed, or the node failed in another way: for example, it could not start its ranks."""

    failure: Failure | None = None  # of a rank, if one failed
    age: float = 0.0  # seconds from the rank's failure to this message


@dataclass(frozen=True)
class Stopped(Message):
    """The node's attempt has ended without success. All its ranks have ended, and it can begin another attempt."""

    port: int  # listens on the node's address, for the next rendezvous store if this is node 0
    outcomes: tuple[Outcome, ...]  # without exceptions; if too long, without tracebacks and output, or even failures
    error: tuple[str, str] | None = None  # as in NodeReport


@dataclass(frozen=True)
class Finished(Message):
    """All ranks of the node have succeeded. On Spark, the task also returns ``report``, unless Spark fails."""

    report: NodeReport
    values: tuple[tuple[int, str], ...] = dataclasses.field(default=(), repr=False)  # rank, base64
    following: tuple[int, ...] = ()  # ranks whose values come as Value


@dataclass(frozen=True)
class Keeping(Message):
    """The node's ranks have ended. ``bringing`` says whether the node is still copying new files to ``output_dir``."""

    bringing: bool


@dataclass(frozen=True)
class Reached(Message):
    """A node's answer to the :class:`Propose` with the same number: whether its ranks can stop at the proposed step."""

    number: int
    accepted: bool  # no rank had reached the step; ranks that do wait there for the decision
    step: int  # the highest that a rank has passed to runtime.should_stop; -1: none has called it


@dataclass(frozen=True)
class RankPreempted(Message):
    """A rank or, without ``rank``, the node got SIGTERM. Its ranks go on until all ranks stop together at one step."""

    rank: int | None = None


@dataclass(frozen=True)
class Halted(Message):
    """A call of ``runtime.should_stop`` told a rank to stop at a step."""

    rank: int
    step: int


#: The messages of a node while all ranks agree on a step at which they stop.
Halting = Reached | RankPreempted | Halted


@dataclass(frozen=True)
class UnfitNode(Message):
    """A task's node cannot create a private folder, and therefore has no agent."""

    host: str
    why: str


@dataclass(frozen=True)
class Dead(Message):
    """A task reports that its node's agent has died."""


@dataclass(frozen=True)
class Orphaned(Message):
    """An agent's owner has ended too early. The node counts as lost unless it ``lives`` on."""

    lives: bool  # its ranks have succeeded, or are about to stop together


@dataclass(frozen=True)
class Bye(Message):
    """The last message on a node's main connection to the driver."""


# From the driver to tasks and nodes.


@dataclass(frozen=True)
class AllFacts(Message):
    """The facts of all tasks. After this message, the tasks start their agents."""

    facts: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Gather(Message):
    """Some tasks cannot reach the driver, so all tasks must exchange facts through Spark."""


@dataclass(frozen=True)
class Proceed(Message):
    """The answer to a message that announces bytes or asks for bytes: the bytes may follow."""


@dataclass(frozen=True)
class Received(Message):
    """The last answer to a request: the announced bytes or all files have arrived, or the node's copy is gone."""


@dataclass(frozen=True)
class Offer(Message):
    """The answer to :class:`Fetch`, once for each file. The file's bytes follow."""

    path: str
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class Refused(Message):
    """The answer to :class:`Upload`, :class:`Copy` or :class:`Recall` if the request is refused; ``why`` says why."""

    why: str


@dataclass(frozen=True)
class Welcome(Message):
    """The driver's answer to :class:`Hello`: how much of the output of the node's ranks the driver has received."""

    offsets: tuple[Offset, ...]


@dataclass(frozen=True)
class BeatHeard(Message):
    """The driver's answer to :class:`Beat`: how much of the output of the node's ranks the driver has received."""

    offsets: tuple[Offset, ...]


@dataclass(frozen=True)
class Farewell(Message):
    """The answer to :class:`Bye`, once the driver has received everything.

    Also sent to nodes that are connected when the job ends, and to a process whose :class:`Hello` comes too late.
    """

    offsets: tuple[Offset, ...]
    failed: bool  # the driver has stopped the run


@dataclass(frozen=True)
class Stop(Message):
    """The driver orders a node to stop its ranks: with SIGTERM, and with SIGKILL after the grace period.

    Also the answer to :class:`TaskFacts` of a task that must not begin, and to :class:`Value` if the run was stopped.
    """

    reason: str
    grace: bool = True  # False: kill at once, even if a grace period has begun
    hasty: bool = False  # another attempt waits: SIGKILL for each rank as soon as it writes no file


@dataclass(frozen=True)
class Terminate(Message):
    """The driver, which got SIGTERM, orders a node to do as if it had got SIGTERM itself."""


@dataclass(frozen=True)
class Begin(Message):
    """The driver orders a node to start its ranks again."""

    attempt: int  # from 0
    port: int  # of node 0, where the ranks of all nodes meet


@dataclass(frozen=True)
class End(Message):
    """The driver tells a node that its ranks will not be started again in this job."""


@dataclass(frozen=True)
class Propose(Message):
    """The driver proposes that all ranks stop at ``step``. A node accepts if none of its ranks has reached it."""

    number: int  # grows with each proposal of an attempt
    step: int
    attempt: int = 0


@dataclass(frozen=True)
class Agree(Message):
    """All nodes have accepted the proposal with this number, so the ranks stop at ``step``."""

    number: int
    step: int
    attempt: int = 0


@dataclass(frozen=True)
class Dump(Message):
    """The driver asks a node for the stacks of its ranks."""

    number: int
    all_threads: bool  # or the main threads only
    timeout: float  # seconds within which the node must answer


# From an agent to a launcher that has imported torch and waits to start ranks.


@dataclass(frozen=True)
class StartRanks(Message):
    """Start the ranks as described in the file ``path``, a pickled :class:`~distributor.values.plan.NodeOrder`."""

    path: str
    names: tuple[str, ...]  # what each file descriptor is for that comes with the message


# From the launcher to its agent. A field ``time`` is in seconds since the epoch.


@dataclass(frozen=True)
class LauncherReady(Message):
    """The launcher has imported torch and has read its order."""

    time: float


@dataclass(frozen=True)
class RanksStarted(Message):
    """All ranks of the node have been started."""

    pids: tuple[int, ...]  # by local rank
    time: float


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Terminated(Message):
    """The launcher got SIGTERM from outside, as all processes of the node may have."""


@dataclass(frozen=True)
class AllPassed(Message):
    """The ranks of all nodes have succeeded: all launchers have reached the exit barrier of torch's elastic agent."""


@dataclass(frozen=True)
class LauncherWarning(Message):
    """A warning for the user; ``text`` completes the sentence "the node on HOST ..."."""

    text: str


@dataclass(frozen=True)
class LauncherFailed(Message):
    """The launcher has failed with an exception."""

    message: str
    traceback: str


# From an owner to a warm process, and from an agent to its owner: pickled, over private connections.


@dataclass(frozen=True)
class Fork(Message):
    """A request to a warm process to fork an agent. ``owner`` is the pid of the process that asks.

    Its file descriptors are the agent's current directory, standard output and error, and the sockets ``names``.
    """

    names: tuple[str, ...]
    owner: int
    environ: dict[str, str] = dataclasses.field(repr=False)  # the agent's


@dataclass(frozen=True)
class Retire(Message):
    """An order to a warm process: accept no more requests, and end once all agents that it has forked have ended."""


@dataclass(frozen=True)
class Rest:
    """The part of a rank's output that the driver does not have: everything in the file ``path`` from ``offset`` on."""

    rank: int
    stream: int
    path: str
    offset: int


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


@dataclass(frozen=True)
class NodeResult(Message):
    """All results of a node, which the agent sends to its owner for the driver."""

    report: bytes = dataclasses.field(repr=False)  # the pickled NodeReport
    values: dict[int, bytes | str | Sent] = dataclasses.field(repr=False)  # or a file's path
    rest: tuple[Rest, ...]  # reports, and output to keep, that the channel did not bring
    failed: bool  # as far as the agent knows
    files: tuple[FileLeft, ...] = ()  # that the channel did not bring
    node_rank: int = -1
    cut: bool = False  # the channel has broken for good


_KINDS = {
    kind.__name__: kind
    for kind in (
        *(TaskFacts, Importing, Value, Upload, Delete, Fetch, FailedReport, HeldStates),
        *(Copy, Recall),
        *(
            Hello,
            Started,
            Beat,
            StackDump,
            Warnings,
            Skipped,
            Failed,
            Stopped,
            Finished,
            Keeping,
            UnfitNode,
            Dead,
            Orphaned,
        ),
        *(Reached, RankPreempted, Halted, Propose, Agree),
        *(
            Bye,
            AllFacts,
            Gather,
            Proceed,
            Received,
            Refused,
            Offer,
            Welcome,
            BeatHeard,
            Farewell,
            Stop,
            Terminate,
            Begin,
            End,
            Dump,
        ),
        *(StartRanks, LauncherReady, RanksStarted, RankExited, Terminated, AllPassed, LauncherWarning, LauncherFailed),
        *(Fork, Retire, NodeResult),
    )
}


def encode(message: Message) -> dict[str, Any]:
    """Return a message as a dict of its kind and fields, with nested dataclasses as dicts and tuples as lists.

    >>> encode(Beat(2))
    {'kind': 'Beat', 'alive': 2, 'idle': None}
    """
    return {"kind": type(message).__name__, **_plain(message)}


def decode(values: Any) -> Message:
    """Return the message that :func:`encode` has turned into the dict ``values``; ValueError if there is none.

    >>> decode({"kind": "Beat", "alive": 2, "idle": 0.5})
    Beat(alive=2, idle=0.5)
    """
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"there is no message of kind {reprlib.repr(kind)}")
    message: Message = _record(_KINDS[kind], {name: value for name, value in values.items() if name != "kind"})
    return message


def _plain(value: Any) -> Any:
    """Replace ``dataclasses.asdict``: it finds no fields in a class that PySpark 3.5's cloudpickle pickled by value."""
    if hasattr(type(value), "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in type(value).__dataclass_fields__}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _record(kind: type[Any], values: Mapping[str, Any]) -> Any:
    hints = {field.name: field.type for field in kind.__dataclass_fields__.values()}
    if any(isinstance(hint, str) for hint in hints.values()):
        hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {reprlib.repr(unknown[0])}")
    try:
        return kind(**{name: _value(hints[name], value) for name, value in values.items()})
    except TypeError as error:
        raise ValueError(str(error)) from None


def _value(hint: Any, value: Any) -> Any:
    """Return a value of an encoded message as the type that an annotation names, or raise a ``ValueError``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _one_of(arguments, value)
    if origin is typing.Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        if arguments[-1] is Ellipsis:
            return tuple(_value(arguments[0], entry) for entry in value)
        if len(arguments) == len(value):
            return tuple(_value(each, entry) for each, entry in zip(arguments, value))
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {_value(arguments[0], key): _value(arguments[1], entry) for key, entry in value.items()}
    elif origin is None and dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _record(typing.cast(type[Any], hint), value)
    elif origin is None and hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif origin is None and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{reprlib.repr(value)} is not of type {hint}")


def _one_of(hints: tuple[Any, ...], value: Any) -> Any:
    if value is None and types.NoneType in hints:
        return None
    for hint in hints:
        try:
            return _value(hint, value)
        except ValueError:
            pass
    raise ValueError(f"{reprlib.repr(value)} is of none of the types {hints}")
