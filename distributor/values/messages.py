"""Every message between the processes of a run, and its form on the wire.

A message is a frozen dataclass. It is sent as a dict of its ``kind`` and its fields. JSON is used on connections to the
driver (the channel), between nodes, and between an agent and its launcher. Pickle is used on other sockets between
processes of one user on one machine, since their messages can hold bytes. :func:`decode` checks each value on arrival.
A rank's output is not sent as a message, but as a :class:`~distributor.values.outcome.Log`.

This module is pickled by value for Spark's workers, where other packages may be missing. So it imports only the
standard library and modules of ``distributor`` that do the same.
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

#: How much of a rank's output to one stream the driver has received: rank, number of the stream, number of bytes.
Offset = tuple[int, int, int]


@dataclass(frozen=True)
class Message:
    """The base class of all messages."""


# From a task or an agent to the driver, before the node's ranks start.


@dataclass(frozen=True)
class TaskFacts(Message):
    """A barrier task sends its facts, such as its address and GPUs, to the driver.

    The driver collects the facts (address, GPUs and more) of all tasks in :class:`distributor.channel.facts.Facts`.

    ``wave`` identifies the tasks that Spark started together; ``attempt`` is Spark's number for this task attempt.
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
    """A node announces a file that a rank wrote. It sends the file's bytes after the driver's :class:`Proceed`.

    The node opens a connection for this message and the file. The driver answers :class:`Received` once it has the
    whole file, or at once if it already has the same bytes. It answers :class:`Refused` if it does not accept the file.
    ``node`` and ``secret`` are as in :class:`Hello`.

    If ``output_dir`` is a URL, the node has already uploaded the file there, and sends no bytes. ``uploaded`` is then
    the file's temporary name at the URL.
    """

    entry: Entry
    uploaded: str | None = None
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Withdraw(Message):
    """A node reports that its ranks have removed a file, so that the driver removes the node's copy of the file.

    If another node has written the same bytes, its copy stays in ``output_dir``. The driver answers :class:`Received`.
    ``node`` is the name of the node, and ``secret`` proves that the message comes from it; see :class:`Hello`.
    """

    path: str
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Fetch(Message):
    """A node asks for all files that are in ``output_dir`` on the driver before the node's ranks start.

    For each file, the driver answers with an :class:`Offer` and the file's bytes. The last answer is :class:`Received`.
    ``node`` and ``secret`` are as in :class:`Hello`.
    """

    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Value(Message):
    """A node announces a rank's return value of ``size`` bytes, and sends it after the driver's :class:`Proceed`.

    The node opens a connection for this message and the value. ``node`` and ``secret`` are as in :class:`Hello`.
    """

    rank: int
    size: int
    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Holding(Message):
    """A node opens a connection that stays open until the run ends, so that the node notices the end of the run.

    While this connection is open, the node may keep the states of its ranks in memory, so that the ranks of the run's
    next job can load these states. ``node`` and ``secret`` are as in :class:`Hello`.
    """

    node: str = ""
    secret: str = dataclasses.field(default="", repr=False)


# From a rank to the agent of another node.


@dataclass(frozen=True)
class Copy(Message):
    """A rank announces that it sends its state to another node, which keeps a copy in memory.

    The agent of the node that is to keep the copy answers :class:`Proceed`, or :class:`Refused` if it has no room.
    After ``Proceed``, the rank sends the contents of three files: a description of the state (the record), pickled
    objects, and tensors. The attributes ``record``, ``objects`` and ``tensors`` are the numbers of bytes of these
    files, and ``slot`` is the name of the file of tensors. The agent answers :class:`Received` once it has all bytes.
    """

    slot: str
    record: int
    objects: int
    tensors: int


@dataclass(frozen=True)
class Recall(Message):
    """A rank asks for parts of a rank's state that another node keeps in a file in shared memory.

    ``path`` is the file's path on the node that is asked. Each of ``parts`` is an offset in the file and a number of
    bytes. The agent of that node answers :class:`Proceed` and sends the bytes of all parts, or answers :class:`Refused`
    if it has no such file.
    """

    path: str
    parts: tuple[tuple[int, int], ...]


# From a node to the driver.


@dataclass(frozen=True)
class Hello(Message):
    """The first message of a node's main connection to the driver: the node's name, the run's placement, and a secret.

    ``placement`` is empty if the node's task connects in place of the agent, because the agent has died or could not be
    started. Only the node's task and agent know ``secret``. Once the driver has received the secret, no other process
    can pretend to be this node.
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
        idle: number of seconds for which all these ranks have been idle; ``None`` if idle time is not measured, or if
            no rank is running.
    """

    alive: int
    idle: float | None = None


@dataclass(frozen=True)
class Stacks(Message):
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
    """A node leaves out ``lines`` lines of a rank's output, since it cannot send lines as fast as the rank writes them.

    The output that the node sends next begins at byte ``offset`` of the rank's stream.
    """

    rank: int
    stream: int
    lines: int
    offset: int


@dataclass(frozen=True)
class Failed(Message):
    """A rank failed, or the node failed in another way: for example, it could not start its ranks.

    ``failure`` says how a rank failed; ``None`` if no rank did. ``age`` is the number of seconds from the rank's
    failure to this message.
    """

    failure: Failure | None = None
    age: float = 0.0


@dataclass(frozen=True)
class Stopped(Message):
    """The node's attempt has ended without success. All its ranks have ended, and the node can begin another attempt.

    Attributes:
        port: port of a socket that listens on the node's address. If the node is node 0, the rendezvous store of the
            next attempt uses this socket.
        outcomes: how the ranks ended, without pickled exceptions. If the message would be too long, tracebacks and
            output are left out too, or even all failures.
        error: class name and text of the node's error, as in :class:`~distributor.values.outcome.NodeReport`.
    """

    port: int
    outcomes: tuple[Outcome, ...]
    error: tuple[str, str] | None = None


@dataclass(frozen=True)
class Finished(Message):
    """All ranks of the node have succeeded. On Spark, the node's task also returns ``report``, unless Spark fails.

    ``values`` are the return values that fit into this message, each as a rank and the pickled value in base64. The
    node sends the values of the ranks in ``following`` over separate connections; see :class:`Value`.
    """

    report: NodeReport
    values: tuple[tuple[int, str], ...] = dataclasses.field(default=(), repr=False)
    following: tuple[int, ...] = ()


@dataclass(frozen=True)
class Keeping(Message):
    """The node's ranks have ended. ``bringing`` says whether the node is still copying new files to ``output_dir``."""

    bringing: bool


@dataclass(frozen=True)
class Reached(Message):
    """A node's answer to the :class:`Propose` with the same number: whether its ranks can stop at the proposed step.

    If ``accepted`` is true, no rank of the node had reached the proposed step, and ranks that reach it wait there for
    the driver's decision. ``step`` is not the proposed step, but the highest step that a rank of the node has passed to
    ``runtime.should_stop``; -1 if no rank has called this function.
    """

    number: int
    accepted: bool
    step: int


@dataclass(frozen=True)
class Preempted(Message):
    """A rank or, without ``rank``, the node got SIGTERM. Its ranks go on until all ranks stop together at one step."""

    rank: int | None = None


@dataclass(frozen=True)
class Halted(Message):
    """A call of ``runtime.should_stop`` told a rank to stop at a step."""

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
    """An agent reports that its owner (the Spark task that started it) has ended too early.

    The node counts as lost unless it ``lives`` on, since its ranks have succeeded or are about to stop together.
    """

    lives: bool


@dataclass(frozen=True)
class Bye(Message):
    """The last message on a node's main connection to the driver."""


# From the driver to tasks and nodes.


@dataclass(frozen=True)
class AllFacts(Message):
    """The facts of all tasks, such as their addresses and GPUs. After this message, the tasks start their agents."""

    facts: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Gather(Message):
    """Some tasks cannot reach the driver, so all tasks must exchange facts, such as addresses, through Spark."""


@dataclass(frozen=True)
class Proceed(Message):
    """The answer to a message that announces bytes or asks for bytes, such as :class:`Value`: the bytes may follow."""


@dataclass(frozen=True)
class Received(Message):
    """The last answer to a request: the request is done.

    After a request that announces bytes, all bytes have arrived. After :class:`Fetch`, the driver has sent all files.
    After :class:`Withdraw`, the driver no longer keeps the node's copy.
    """


@dataclass(frozen=True)
class Offer(Message):
    """The answer to :class:`Fetch`, once for each file: a description of the file. The file's bytes follow."""

    path: str
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class Refused(Message):
    """The answer to :class:`Deposit`, :class:`Copy` or :class:`Recall` if the request is refused; ``why`` says why."""

    why: str


@dataclass(frozen=True)
class Welcome(Message):
    """The driver's answer to :class:`Hello`: how much of the output of the node's ranks the driver has received."""

    offsets: tuple[Offset, ...]


@dataclass(frozen=True)
class Heard(Message):
    """The driver's answer to :class:`Beat`: how much of the output of the node's ranks the driver has received."""

    offsets: tuple[Offset, ...]


@dataclass(frozen=True)
class Farewell(Message):
    """The driver's answer to :class:`Bye`, once the driver has received everything that the node has sent.

    The driver also sends this message, without a ``Bye``, to each node that is still connected when the job ends, and
    to a process whose :class:`Hello` it refuses because the run has been stopped.

    ``offsets`` says how much of the output of the node's ranks the driver has received. ``failed`` says whether the
    driver has stopped the run.
    """

    offsets: tuple[Offset, ...]
    failed: bool


@dataclass(frozen=True)
class Stop(Message):
    """The driver orders a node to stop its ranks: with SIGTERM, and with SIGKILL after the grace period.

    Without ``grace``, the node kills the ranks at once, even if a grace period has already begun. ``hasty`` means that
    another attempt waits for the ranks to end. The node then kills each rank, without SIGTERM, as soon as the rank is
    not writing a file.

    The driver also answers :class:`TaskFacts` with this message if the task must not begin its work, and :class:`Value`
    if the run has been stopped.
    """

    reason: str
    grace: bool = True
    hasty: bool = False


@dataclass(frozen=True)
class Terminate(Message):
    """The driver, which got SIGTERM, orders a node to do as if it had got SIGTERM itself."""


@dataclass(frozen=True)
class Begin(Message):
    """The driver orders a node to start its ranks again. The ranks of all nodes meet at the port ``port`` of node 0.

    ``attempt`` is the number of this attempt, counted from 0.
    """

    attempt: int
    port: int


@dataclass(frozen=True)
class End(Message):
    """The driver tells a node that its ranks will not be started again in this job."""


@dataclass(frozen=True)
class Propose(Message):
    """The driver proposes that all ranks stop at ``step``. A node accepts if none of its ranks has reached this step.

    ``number`` grows with each proposal of an attempt.
    """

    number: int
    step: int
    attempt: int = 0


@dataclass(frozen=True)
class Agree(Message):
    """All nodes have accepted the proposal (:class:`Propose`) with this number, so the ranks stop at ``step``."""

    number: int
    step: int
    attempt: int = 0


@dataclass(frozen=True)
class Dump(Message):
    """The driver asks a node for the stacks of its ranks: of all threads, or of the main threads only.

    The node must answer within ``timeout`` seconds.
    """

    number: int
    all_threads: bool
    timeout: float


# From an agent to a launcher that has imported torch and waits to start ranks.


@dataclass(frozen=True)
class StartRanks(Message):
    """Start the ranks as described in the file ``path`` (a pickled :class:`~distributor.values.plan.NodeOrder`).

    File descriptors are sent with this message; ``names`` says what each descriptor is for.
    """

    path: str
    names: tuple[str, ...]


# From the launcher to its agent. A field ``time`` is in seconds since the epoch.


@dataclass(frozen=True)
class LauncherReady(Message):
    """The launcher has imported torch and has read the order that says which ranks to start."""

    time: float


@dataclass(frozen=True)
class RanksStarted(Message):
    """All ranks of the node have been started; ``pids`` are their process IDs by local rank."""

    pids: tuple[int, ...]
    time: float


@dataclass(frozen=True)
class RankExited(Message):
    """A rank's process has ended.

    All times are seconds of ``time.monotonic()``, a clock that all processes of the host share.

    Attributes:
        local_rank: the rank.
        code: the exit code; if a signal ended the process, the negative number of the signal.
        stopped: when the launcher began to stop the rank; ``None`` if the launcher did not.
        moment: when the process ended.
        released: when the launcher told the rank to end because the rank only served other ranks (as a parameter server
            does) and all of these had succeeded; ``None`` if the launcher did not. If this time is set, ``code`` is 0,
            however the process ended.
        early: whether the rank has left with code 0 although its function has not returned.
    """

    local_rank: int
    code: int
    stopped: float | None
    moment: float
    released: float | None = None
    early: bool = False

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
    """A warning of the launcher to show to the user; ``text`` completes the sentence "the node on HOST ..."."""

    text: str


@dataclass(frozen=True)
class LauncherFailed(Message):
    """The launcher (the process that starts the ranks) has failed with an exception."""

    message: str
    traceback: str


# From an owner (a Spark task, or the driver in local mode) to a warm process, which forks agents; and from an agent to
# its owner. These messages are pickled, and sent over private connections.


@dataclass(frozen=True)
class Fork(Message):
    """A request to a warm process to fork an agent. ``owner`` is the pid of the process that asks.

    A warm process has imported torch. The agent gets the environment variables ``environ`` and the file descriptors
    that are sent with the message: the current directory, standard output, standard error, and the sockets that
    ``names`` lists, in this order.
    """

    names: tuple[str, ...]
    owner: int
    environ: dict[str, str] = dataclasses.field(repr=False)


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

    @property
    def size(self) -> int:
        """Number of bytes of the rank's output that the driver does not have: from ``offset`` to the file's end."""
        return os.path.getsize(self.path) - self.offset


@dataclass(frozen=True)
class Sent:
    """A return value that the driver has received over the channel: its number of bytes and its digest (sha256)."""

    size: int
    digest: bytes


@dataclass(frozen=True)
class FileLeft:
    """A new file that a rank has written, and of which the driver does not know yet.

    ``source`` is the file's path on the node. If ``output_dir`` is a URL and the node has uploaded the file there,
    ``source`` is ``None``, and ``uploaded`` is the file's temporary name at the URL.
    """

    entry: Entry
    source: str | None
    uploaded: str | None = None

    @property
    def size(self) -> int:
        """Number of bytes of the file that must be sent to the driver; 0 if the node has uploaded the file."""
        return 0 if self.source is None else self.entry.size


@dataclass(frozen=True)
class NodeResult(Message):
    """All results of a node. The agent sends them to its owner (the process that started it) for the driver.

    Attributes:
        report: the pickled :class:`~distributor.values.outcome.NodeReport`.
        values: for each rank whose return value the driver wants, the pickled value, the path of a file with this
            value, or a :class:`Sent` if the driver already has the value.
        rest: ranks' reports and, if the driver keeps all output, ranks' output that the driver has not received over
            the channel (the node's connection to the driver).
        failed: whether the run has failed, as far as the agent knows.
        files: files that ranks wrote and that the driver has not received over the channel.
        node_rank: the node's rank.
    """

    report: bytes = dataclasses.field(repr=False)
    values: dict[int, bytes | str | Sent] = dataclasses.field(repr=False)
    rest: tuple[Rest, ...]
    failed: bool
    files: tuple[FileLeft, ...] = ()
    node_rank: int = -1

    @property
    def size(self) -> int:
        """Number of bytes of output and files that the process which started the agent must pass to the driver."""
        return sum(part.size for part in self.rest) + sum(file.size for file in self.files)


_KINDS = {
    kind.__name__: kind
    for kind in (
        *(TaskFacts, Importing, Value, Deposit, Withdraw, Fetch, Holding),
        *(Copy, Recall),
        *(Hello, Started, Beat, Stacks, Warnings, Skipped, Failed, Stopped, Finished, Keeping, Unfit, Dead, Orphaned),
        *(Reached, Preempted, Halted, Propose, Agree),
        *(
            Bye,
            AllFacts,
            Gather,
            Proceed,
            Received,
            Refused,
            Offer,
            Welcome,
            Heard,
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
    """Return the message that :func:`encode` has turned into the dict ``values``.

    Raises:
        ValueError: ``values`` is not a dict that :func:`encode` returns.

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

    This function replaces ``dataclasses.asdict``, which finds no fields in a class that PySpark 3.5's cloudpickle has
    pickled by value.
    """
    if hasattr(type(value), "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in type(value).__dataclass_fields__}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _record(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Return an instance of the dataclass ``kind`` with ``values`` as fields. Other fields get their defaults."""
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
