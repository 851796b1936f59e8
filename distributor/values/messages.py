"""Every message between the processes of a run, and its form on the wire.

A message is a frozen dataclass. It is sent as an object of plain values: its ``kind`` and its fields. Connections to
the driver (the channel) and the launcher's pipe use JSON. Sockets between processes of one user on one machine use
pickle, since those messages can hold bytes. :func:`decode` checks each value on arrival. A rank's output is not sent as
a message, but as a :class:`~distributor.values.outcome.Log`.

This module is pickled by value for Spark's workers, so it is self-contained and uses the standard library only.
"""

# The annotations of messages are read at run time, so this module does not postpone their evaluation.

import dataclasses
import os
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

#: How much of a stream the driver has: rank, stream, number of bytes.
Offset = tuple[int, int, int]


@dataclass(frozen=True)
class Message:
    """The base class of all messages."""


# From a task to the driver, before its node has an agent or after the agent has ended.


@dataclass(frozen=True)
class TaskFacts(Message):
    """The facts of one barrier task, as :class:`distributor.channel.facts.Facts` gathers them.

    ``wave`` identifies the tasks that were started together; ``attempt`` is the number of this task's attempt.
    """

    wave: str
    attempt: int
    partition: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Importing(Message):
    """A node is importing a module before its ranks start. If ``module`` is empty, the node has finished importing.

    ``nodes`` is the number of nodes of the run.
    """

    node: str
    nodes: int
    module: str


# From a node to the driver, each as the first message of a connection of its own.


@dataclass(frozen=True)
class Deposit(Message):
    """A node announces a new file of its ranks. After the driver's :class:`Proceed`, it sends the file's bytes.

    This is the first message of a connection. If the node has uploaded the file to the run's URL, ``uploaded`` is the
    file's name there, and no bytes follow. The driver answers :class:`Received` once it has the file, or at once if it
    has the same bytes already. It answers :class:`Refused` if it refuses the file. ``node`` and ``secret`` are as in
    :class:`Hello`.
    """

    entry: Entry
    uploaded: str | None = None
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Withdraw(Message):
    """A node's ranks have removed a file that was copied. ``node`` and ``secret`` are as in :class:`Hello`."""

    path: str
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Fetch(Message):
    """A node asks for all files that the driver has kept from earlier runs.

    For each file, the driver answers with an :class:`Offer` and the file's bytes. The last answer is :class:`Received`.
    ``node`` and ``secret`` are as in :class:`Hello`.
    """

    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Value(Message):
    """A node announces a rank's return value of ``size`` bytes, and sends it after the driver's :class:`Proceed`.

    This is the first message of a connection. ``node`` and ``secret`` are as in :class:`Hello`.
    """

    rank: int
    size: int
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Holding(Message):
    """A node opens a connection that ends when the driver closes this job's channel, at the end of the run.

    Until then, the node may keep the states of ranks for the run's next job. ``node`` and ``secret`` are as in
    :class:`Hello`.
    """

    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


# From a rank to the agent of another node.


@dataclass(frozen=True)
class Copy(Message):
    """A rank sends its state to another node, which keeps a copy in memory.

    The bytes of three files follow, each with the given size: the record, the objects and the tensors. ``slot`` is the
    name of the file of tensors. The other node answers :class:`Received`, or :class:`Refused` if it has no room.
    """

    slot: str
    record: int
    objects: int
    tensors: int


@dataclass(frozen=True)
class Recall(Message):
    """A rank asks for some parts of a file that the other node keeps in memory.

    ``path`` is the file's path. Each of ``parts`` is an offset and a number of bytes. The other node answers
    :class:`Proceed` and sends the bytes of all parts, or answers :class:`Refused` if it has no such file.
    """

    path: str
    parts: tuple[tuple[int, int], ...]


# From a node to the driver.


@dataclass(frozen=True)
class Hello(Message):
    """The first message of each connection of a node: the node's name, the run's placement, and a secret.

    ``placement`` is empty if the node's agent has died and its task connects instead. Only the node's task and agent
    know ``secret``. Once the driver has it, no other process can pretend to be this node.
    """

    node: str
    placement: tuple[Node, ...] = ()
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Started(Message):
    """The node has started its ranks."""


@dataclass(frozen=True)
class Beat(Message):
    """A heartbeat of a node.

    Attributes:
        alive: number of the node's ranks that are still running.
        idle: number of seconds for which all these ranks have been idle; ``None`` if idle time is not measured.
    """

    alive: int
    idle: float | None = None


@dataclass(frozen=True)
class Stacks(Message):
    """The stacks of one rank, in answer to the :class:`Dump` with the same number."""

    number: int
    rank: int
    text: str


@dataclass(frozen=True)
class Warnings(Message):
    """Warnings to show; each text completes the sentence "the node on HOST ..."."""

    host: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Skipped(Message):
    """``lines`` lines of a rank's output are left out, since the live view is too far behind.

    The output goes on at ``offset``, in bytes.
    """

    rank: int
    stream: int
    lines: int
    offset: int


@dataclass(frozen=True)
class Failed(Message):
    """A rank failed, or the node failed to start its ranks, ``age`` seconds before the message was sent."""

    failure: Failure | None = None
    age: float = 0.0


@dataclass(frozen=True)
class Stopped(Message):
    """The node's attempt has ended without success. None of its processes is left, and the node can begin again.

    ``port`` is the port of a socket that listens on the node's address. Node 0 uses it for the rendezvous store of the
    next attempt. ``outcomes`` have no pickled exceptions. If they are still too long for a message, tracebacks and
    output are left out too, or even all failures. ``error`` says why the node could not start its ranks, as in
    :class:`~distributor.values.outcome.NodeReport`.
    """

    port: int
    outcomes: tuple[Outcome, ...]
    error: tuple[str, str] | None = None


@dataclass(frozen=True)
class Finished(Message):
    """All ranks of the node have succeeded. The same report comes through Spark, unless Spark fails.

    ``values`` are the small return values, each as a rank and the pickled value in base64. The values of the ranks in
    ``following`` come over separate connections; see :class:`Value`.
    """

    report: NodeReport
    values: tuple[tuple[int, str], ...] = dataclasses.field(default=(), repr=False)
    following: tuple[int, ...] = ()


@dataclass(frozen=True)
class Keeping(Message):
    """The node's ranks have ended. The node is copying their last new files (``bringing``), or has copied them."""

    bringing: bool


@dataclass(frozen=True)
class Reached(Message):
    """The answer to the :class:`Propose` with the same number.

    ``accepted`` says that no rank of the node has reached the proposed step, and that ranks will wait there for the
    driver's decision. ``step`` is the highest step that a rank of the node has passed to ``runtime.should_stop``; -1 if
    no rank has called it.
    """

    number: int
    accepted: bool
    step: int


@dataclass(frozen=True)
class Preempted(Message):
    """A rank got SIGTERM, and goes on until all ranks stop together."""

    rank: int


@dataclass(frozen=True)
class Halted(Message):
    """A rank was told to stop at a step."""

    rank: int
    step: int


#: The messages of a node while all ranks agree on a step at which they stop.
Halting = Reached | Preempted | Halted


@dataclass(frozen=True)
class Unfit(Message):
    """A task reports that its node cannot create a private folder, and therefore has no agent. ``why`` says why."""

    host: str
    why: str


@dataclass(frozen=True)
class Dead(Message):
    """A task reports that its node's agent has died."""


@dataclass(frozen=True)
class Orphaned(Message):
    """The node's owner, a Spark task, is gone. The node is lost unless its ranks have ``succeeded``."""

    succeeded: bool


@dataclass(frozen=True)
class Bye(Message):
    """The node sends nothing more."""


# From the driver to tasks and nodes.


@dataclass(frozen=True)
class AllFacts(Message):
    """The facts of all tasks. The tasks may begin."""

    facts: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Gather(Message):
    """Some tasks cannot reach the driver, so all tasks must exchange their facts through Spark."""


@dataclass(frozen=True)
class Proceed(Message):
    """The answer to :class:`Value` and :class:`Deposit`: the driver asks for the bytes."""


@dataclass(frozen=True)
class Received(Message):
    """The driver has all bytes of a value or a file."""


@dataclass(frozen=True)
class Offer(Message):
    """The answer to :class:`Fetch`: the driver sends a file. ``mtime_ns`` is as in ``Entry``."""

    path: str
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class Refused(Message):
    """The answer to :class:`Deposit`: the driver refuses the file. ``why`` is a short text."""

    why: str


@dataclass(frozen=True)
class Welcome(Message):
    """The answer to :class:`Hello`: how much of the node's output the driver has."""

    offsets: tuple[Offset, ...]


@dataclass(frozen=True)
class Heard(Message):
    """The answer to :class:`Beat`: how much of the node's output the driver has."""

    offsets: tuple[Offset, ...]


@dataclass(frozen=True)
class Farewell(Message):
    """The answer to :class:`Bye`, once the driver has received everything.

    ``failed`` says whether the driver has stopped the run.
    """

    offsets: tuple[Offset, ...]
    failed: bool


@dataclass(frozen=True)
class Stop(Message):
    """Stop the ranks: first SIGTERM, then SIGKILL after the grace period.

    Without ``grace``, kill them at once, even if a grace period has already begun. With ``hasty``, another attempt
    waits for their end: kill them as soon as they are not writing a file.
    """

    reason: str
    grace: bool = True
    hasty: bool = False


@dataclass(frozen=True)
class Begin(Message):
    """Start the ranks again, as attempt ``attempt``; the first was 0. They meet at node 0's address and ``port``."""

    attempt: int
    port: int


@dataclass(frozen=True)
class End(Message):
    """There is no further attempt."""


@dataclass(frozen=True)
class Propose(Message):
    """The ranks must stop together at ``step``, if no rank has reached it.

    ``number`` grows with each proposal of an attempt.
    """

    number: int
    step: int
    attempt: int = 0


@dataclass(frozen=True)
class Agree(Message):
    """All nodes have accepted the proposal with this number and step."""

    number: int
    step: int
    attempt: int = 0


@dataclass(frozen=True)
class Dump(Message):
    """Send the stacks of all ranks within ``timeout`` seconds: of all threads, or of the main threads only."""

    number: int
    all_threads: bool
    timeout: float


# From an agent to a launcher that waits.


@dataclass(frozen=True)
class StartRanks(Message):
    """Start the ranks that the order in the file ``path`` describes.

    File descriptors are sent with the message; ``names`` says what each of them is.
    """

    path: str
    names: tuple[str, ...]


# From the launcher to its agent. Times are in seconds since the epoch.


@dataclass(frozen=True)
class LauncherReady(Message):
    """The launcher has imported torch and has its order."""

    time: float


@dataclass(frozen=True)
class RanksStarted(Message):
    """All ranks have been started; ``pids`` are their pids by local rank."""

    pids: tuple[int, ...]
    time: float


@dataclass(frozen=True)
class RankExited(Message):
    """A rank's process has ended with exit code ``code``, negative for a signal, at the time ``moment``.

    ``stopped`` is when the launcher told the rank to stop; ``None`` if it did not. ``released`` is when the launcher
    told the rank to end because it no longer had to serve other ranks; ``code`` is then 0. Times are seconds on a clock
    that all processes of the host share (``time.monotonic()``).
    """

    local_rank: int
    code: int
    stopped: float | None
    moment: float
    released: float | None = None


@dataclass(frozen=True)
class AllPassed(Message):
    """The ranks of all nodes have succeeded: all nodes are at the exit barrier."""


@dataclass(frozen=True)
class LauncherWarning(Message):
    """A warning of the launcher, as in :class:`Warnings`."""

    text: str


@dataclass(frozen=True)
class LauncherFailed(Message):
    """The launcher has failed."""

    message: str
    traceback: str


# From an owner (a Spark task, or the driver in local mode) to a warm process, and from an agent to its owner: pickled,
# over private connections.


@dataclass(frozen=True)
class Fork(Message):
    """Fork an agent for the process ``owner``, with these environment variables.

    These file descriptors are sent with the message, in this order: the current directory, standard output, standard
    error, and the sockets that ``names`` lists.
    """

    names: tuple[str, ...]
    owner: int
    environ: dict[str, str] = dataclasses.field(repr=False)


@dataclass(frozen=True)
class Retire(Message):
    """Accept no more requests, and end with the last agent."""


@dataclass(frozen=True)
class Rest:
    """The part of a rank's output that the driver does not have: everything in a file from ``offset`` on."""

    rank: int
    stream: int
    path: str
    offset: int

    @property
    def size(self) -> int:
        """Number of bytes of that part."""
        return os.path.getsize(self.path) - self.offset


@dataclass(frozen=True)
class Sent:
    """A return value that the driver has received over the channel: its number of bytes and its digest (sha256)."""

    size: int
    digest: bytes


@dataclass(frozen=True)
class FileLeft:
    """A new file that a rank has written, and of which the driver does not know yet.

    ``source`` is its path on the node, or ``None`` if the node has uploaded it to the run's URL, as ``uploaded``.
    """

    entry: Entry
    source: str | None
    uploaded: str | None = None

    @property
    def size(self) -> int:
        """Number of bytes that must be sent."""
        return 0 if self.source is None else self.entry.size


@dataclass(frozen=True)
class NodeResult(Message):
    """All results of a node.

    ``report`` is the pickled :class:`~distributor.values.outcome.NodeReport`. ``values`` holds, for each rank, the
    pickled return value, or the path of a file that holds it, or a :class:`Sent` if the driver already has it.
    ``failed`` says whether the run has failed, as far as the node knows. ``rest`` and ``files`` are output and new
    files that go through Spark because the driver does not have them yet. ``node_rank`` is the node's rank.
    """

    report: bytes = dataclasses.field(repr=False)
    values: dict[int, bytes | str | Sent] = dataclasses.field(repr=False)
    rest: tuple[Rest, ...]
    failed: bool
    files: tuple[FileLeft, ...] = ()
    node_rank: int = -1

    @property
    def size(self) -> int:
        """Number of bytes of output and files that must be sent."""
        return sum(part.size for part in self.rest) + sum(file.size for file in self.files)


_KINDS = {
    kind.__name__: kind
    for kind in (
        *(TaskFacts, Importing, Value, Deposit, Withdraw, Fetch, Holding),
        *(Copy, Recall),
        *(Hello, Started, Beat, Stacks, Warnings, Skipped, Failed, Stopped, Finished, Keeping, Unfit, Dead, Orphaned),
        *(Reached, Preempted, Halted, Propose, Agree),
        *(Bye, AllFacts, Gather, Proceed, Received, Refused, Offer, Welcome, Heard, Farewell, Stop, Begin, End, Dump),
        *(StartRanks, LauncherReady, RanksStarted, RankExited, AllPassed, LauncherWarning, LauncherFailed),
        *(Fork, Retire, NodeResult),
    )
}


def encode(message: Message) -> dict[str, Any]:
    """Return a message as plain values.

    >>> encode(Beat(2))
    {'kind': 'Beat', 'alive': 2, 'idle': None}
    """
    return {"kind": type(message).__name__, **_plain(message)}


def decode(values: Any) -> Message:
    """Return the message that plain values encode.

    Raises:
        ValueError: the values do not encode a message.

    >>> decode({"kind": "Beat", "alive": 2, "idle": 0.5})
    Beat(alive=2, idle=0.5)
    """
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"there is no message of kind {reprlib.repr(kind)}")
    message: Message = _record(_KINDS[kind], {name: value for name, value in values.items() if name != "kind"})
    return message


def _plain(value: Any) -> Any:
    """Return a value with dataclasses as dicts and sequences as lists.

    ``dataclasses.asdict`` finds no fields in a class that PySpark 3.5's cloudpickle has pickled by value.
    """
    if hasattr(type(value), "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in type(value).__dataclass_fields__}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _record(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Return the dataclass instance with these fields; a field without a value has its default."""
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
    """Return a plain value as the type that an annotation names, or raise a ``ValueError``."""
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
