"""Decide which messages the driver accepts from processes that have the run's token.

Any rank can read the token. The driver therefore accepts messages about a node and its ranks only from a process that
has proved with the node's secret that it belongs to the node. A refused message ends the connection on which it came,
and nothing else. This module has no side effects except that it logs refusals. It has nothing to do with the guard
process, which is the parent process of an agent.
"""

from __future__ import annotations

import base64
import hmac
import math
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from distributor.channel import proof
from distributor.channel.frames import MAX_BODY, ProtocolError
from distributor.text import notices
from distributor.values import messages
from distributor.values.messages import Message
from distributor.values.outcome import REPORTS, UNCAUGHT, Failure, Log, Outcome
from distributor.values.placement import Node, Placement

_log = notices.logger

T = TypeVar("T")

#: Maximum number of refusals that are logged in a run.
_MOST_LOGGED = 10

#: Maximum number of different warnings of one node that are shown.
_MOST_WARNINGS = 64

#: Maximum number of node names per task that are accepted while the run's nodes are not known.
_NAMES_PER_TASK = 4

#: Maximum numbers of characters of names, of paths, of warnings, and of the stacks of one rank.
_LONGEST_NAME = 512
_LONGEST_PATH = 4096
_LONGEST_WARNING = 16 << 10
_LONGEST_STACKS = 512 << 10

#: Maximum number of bytes of a connection's first message: a fixed number, plus a number for each task.
_FIRST = 64 << 10
_FIRST_PER_TASK = 4 << 10

#: The largest whole number that a message may hold.
_LARGEST = 2**63 - 1

_STREAMS = range(1, REPORTS + 1)

#: States of ranks that have succeeded.
_SUCCEEDED = ("finished", "unreturned")


class Guard:
    """Checks messages against what is known about the run's nodes. Use it in the channel's thread only.

    Without arguments, it cannot check which nodes and ranks the run has.

    Args:
        label: the run's label in the log.
        tasks: number of tasks of the run.
        world_size: number of ranks of the run; ``None`` if it is not known.
        placement: returns the placement once a node has reported it, until then ``None``.
        received: returns how many bytes of a rank's stream have arrived.
        skips: whether nodes may leave out output if the driver is too slow.
    """

    def __init__(
        self,
        label: str = "",
        tasks: int = 0,
        world_size: int | None = None,
        placement: Callable[[], Placement | None] = lambda: None,
        received: Callable[[int, int], int] | None = None,
        *,
        skips: bool = True,
    ) -> None:
        self._label = label
        self._tasks = tasks
        self._world_size = world_size
        self._placement = placement
        self._received = received
        self._skips = skips
        self._known: tuple[Placement | None, dict[str, Node]] = (None, {})
        self._secrets: dict[str, str] = {}
        #: The seal with which tasks make secrets for nodes. Without a seal, the first secret that a node shows is
        #: accepted.
        self.seal: bytes | None = None
        self._importing: set[str] = set()
        self._warned: dict[str, set[str]] = {}
        self._refused = 0

    @property
    def first_limit(self) -> int:
        """Maximum number of bytes of the first message of a connection."""
        return min(MAX_BODY, _FIRST + _FIRST_PER_TASK * self._tasks)

    def log(self, peer: str, why: str) -> None:
        """Log that a connection was ended, and why. Only the first :data:`_MOST_LOGGED` ends are logged."""
        self._refused += 1
        if self._refused <= _MOST_LOGGED:
            last = "; further ones are not logged" if self._refused == _MOST_LOGGED else ""
            run = f"run {self._label}: " if self._label else ""
            _log.warning("%sended a connection from %s, which %s%s", run, peer, why, last)

    @property
    def names(self) -> Collection[str] | None:
        """The names of the run's nodes; ``None`` while they are not known."""
        placement, nodes = self._nodes()
        return None if placement is None else nodes.keys()

    def check_facts(self, told: messages.TaskFacts) -> None:
        """Check the facts of a task.

        Raises:
            ProtocolError: the facts cannot come from a task of this run.
        """
        if told.partition not in range(self._tasks):
            raise ProtocolError(f"there is no task {told.partition}")
        _check_number("the number of a task attempt", told.attempt)
        _check_length("the name of a wave", told.wave, _LONGEST_NAME)

    def check_importing(self, told: messages.Importing) -> None:
        """Check a message that a node is importing a module. The node need not have said hello yet.

        Raises:
            ProtocolError: the run has no such node, or cannot have that many nodes.
        """
        _check_length("the name of a module", told.module, _LONGEST_NAME)
        _check_length("the name of a node", told.node, _LONGEST_NAME)
        if self._world_size is None:
            return
        if not 0 < told.nodes <= self._tasks:
            raise ProtocolError(f"the run has {self._tasks} tasks, and cannot have {told.nodes} nodes")
        placement, nodes = self._nodes()
        if placement is not None and told.node not in nodes:
            raise ProtocolError(f"there is no node {told.node!r}")
        self._check_count({*self._importing, told.node})
        self._importing.add(told.node)

    def check_value(self, value: messages.Value) -> None:
        """Check that the agent of the rank's node has sent the announcement of a return value.

        Raises:
            ProtocolError: the sender is not the agent of the rank's node.
        """
        if not self._proves(value.node, value.secret):
            raise ProtocolError(f"the value of rank {value.rank} comes without the secret of the rank's node")
        self._check_rank(value.node, value.rank)

    def check_node(self, told: messages.Deposit | messages.Withdraw | messages.Fetch | messages.Holding) -> int:
        """Check that a message was sent by an agent of this run, and return the rank of its node.

        Raises:
            ProtocolError: the sender is not an agent of this run.
        """
        nodes = self._nodes()[1]
        if told.node not in nodes or not self._proves(told.node, told.secret):
            raise ProtocolError(f"a {type(told).__name__} comes without the secret of its node")
        return nodes[told.node].node_rank

    def check_deposit(self, told: messages.Deposit | messages.Withdraw) -> int:
        """Check a message about a new or removed file, and return the rank of the sender's node.

        Raises:
            ProtocolError: the sender is not an agent of this run, or the file cannot be a new file of a rank.
        """
        node = self.check_node(told)
        path = told.path if isinstance(told, messages.Withdraw) else told.entry.path
        _check_path(path)
        if isinstance(told, messages.Deposit) and told.uploaded is not None:
            _check_path(told.uploaded)
        if isinstance(told, messages.Deposit):
            _check_number("the size of a file", told.entry.size)
            _check_number("the time of a file", told.entry.mtime_ns)
            if told.entry.mode & ~0o777:
                raise ProtocolError(f"a file of a rank cannot have the mode {told.entry.mode:o}")
        return node

    def admit(self, hello: messages.Hello) -> None:
        """Register a node that says hello.

        Raises:
            ProtocolError: the run has no such node, the secret is not valid, or another process has registered as this
                node.
        """
        _check_length("the name of a node", hello.node, _LONGEST_NAME)
        _check_length("the secret of a node", hello.secret, _LONGEST_NAME)
        if self.seal is not None and not proof.holds(self.seal, hello.node, hello.secret):
            raise ProtocolError(f"the sender has no valid secret for node {hello.node!r}")
        if not _equal(self._secrets.get(hello.node, hello.secret), hello.secret):
            raise ProtocolError(f"another process has already registered as node {hello.node!r}")
        if self._world_size is not None:
            self._check_placed(hello, self._world_size)
        self._secrets[hello.node] = hello.secret

    def forget(self, node: str) -> None:
        """Forget a lost node, since Spark may start another node with the same name."""
        self._secrets.pop(node, None)

    def passes(self, node: str, message: Message | Log) -> bool:
        """Check a message of a node, and return whether to pass it on. Warnings beyond the limits are not passed on.

        Raises:
            ProtocolError: the node may not send this message.
        """
        match message:
            case Log():
                self._check_log(node, message)
            case messages.Beat():
                self._check_beat(node, message)
            case messages.Skipped():
                self._check_skipped(node, message)
            case messages.Stacks():
                _check_number("the number of a request", message.number)
                _check_length("stacks", message.text, _LONGEST_STACKS)
                self._check_rank(node, message.rank)
            case messages.Failed():
                _check_times(message)
                self._check_failure(node, message.failure)
            case messages.Stopped():
                self._check_stopped(node, message)
            case messages.Finished():
                self._check_finished(node, message)
            case messages.Reached() | messages.Preempted() | messages.Halted():
                self._check_halting(node, message)
            case messages.Importing():
                if message.node != node:
                    raise ProtocolError(f"the sender is not node {message.node!r}")
                self.check_importing(message)
            case messages.Warnings():
                return self._is_new(node, message)
            case messages.Unfit():
                _check_length("the name of a host", message.host, _LONGEST_NAME)
                _check_length("a reason", message.why, _LONGEST_WARNING)
            case messages.Started() | messages.Keeping() | messages.Dead() | messages.Orphaned() | messages.Bye():
                pass
            case _:
                raise ProtocolError(f"a node does not send {type(message).__name__}")
        return True

    def _proves(self, node: str, secret: str) -> bool:
        """Return whether a secret is the one that the node has sent in its hello.

        If the guard does not know the number of ranks, the empty secret is valid for a node that has not said hello.
        """
        known = node in self._secrets or self._world_size is None
        return known and _equal(self._secrets.get(node, ""), secret)

    def _nodes(self) -> tuple[Placement | None, dict[str, Node]]:
        """Return the placement, and its nodes by name."""
        placement = self._placement()
        if placement is not self._known[0]:
            nodes = () if placement is None else placement.nodes
            self._known = placement, {node.executor: node for node in nodes}
        return self._known

    def _ranks(self, name: str) -> range | None:
        """Return the ranks of a node; ``None`` while they are not known."""
        placement, nodes = self._nodes()
        if placement is None:
            return None
        return nodes[name].ranks if name in nodes else range(0)

    def _check_placed(self, hello: messages.Hello, world_size: int) -> None:
        placement, nodes = self._nodes()
        if placement is None and hello.placement:
            _check_placement(hello.placement, world_size)
            nodes = {node.executor: node for node in hello.placement}
        if nodes and hello.node not in nodes:
            raise ProtocolError(f"there is no node {hello.node!r}")
        if not nodes:
            self._check_count({*self._secrets, hello.node})

    def _check_count(self, names: set[str]) -> None:
        """Check the number of node names. It may exceed the number of tasks, since Spark may start tasks again.

        Nodes then have other names. This check is for the time before the placement says which nodes the run has.
        """
        if len(names) > _NAMES_PER_TASK * max(1, self._tasks):
            raise ProtocolError("there are more nodes than the run can have")

    def _check_rank(self, node: str, rank: int) -> None:
        ranks = self._ranks(node)
        if ranks is not None and rank not in ranks:
            raise ProtocolError(f"rank {rank} is not on node {node!r}")

    def _check_log(self, node: str, log: Log) -> None:
        self._check_rank(node, log.rank)
        if log.stream not in _STREAMS:
            raise ProtocolError(f"there is no stream {log.stream}")
        if log.offset + len(log.data) > _LARGEST:
            raise ProtocolError(f"no output has {log.offset} bytes")
        if self._received is not None and log.offset > (had := self._received(log.rank, log.stream)):
            raise ProtocolError(f"bytes {had}-{log.offset} of the output of rank {log.rank} are left out")

    def _check_skipped(self, node: str, skipped: messages.Skipped) -> None:
        self._check_rank(node, skipped.rank)
        if skipped.stream not in range(1, UNCAUGHT + 1):
            raise ProtocolError(f"stream {skipped.stream} is not output")
        _check_number("a number of lines", skipped.lines)
        _check_number("a position", skipped.offset)
        if not self._skips:
            raise ProtocolError(f"output of rank {skipped.rank} is left out, but the driver keeps all of it")

    def _check_beat(self, node: str, beat: messages.Beat) -> None:
        ranks = self._ranks(node)
        if beat.alive < 0 or (ranks is not None and beat.alive > len(ranks)):
            raise ProtocolError(f"node {node!r} cannot have {beat.alive} living ranks")
        if beat.idle is not None and not 0 <= beat.idle < math.inf:
            raise ProtocolError(f"no rank is idle for {beat.idle} s")

    def _check_halting(self, node: str, told: messages.Halting) -> None:
        if isinstance(told, messages.Reached):
            _check_number("the number of a proposal", told.number)
            _check_number("a step", max(told.step, 0))
            return
        self._check_rank(node, told.rank)
        if isinstance(told, messages.Halted):
            _check_number("a step", told.step)

    def _check_failure(self, node: str, failure: Failure | None) -> None:
        if failure is not None:
            self._check_rank(node, failure.rank)
            _check_times(failure)

    def _check_stopped(self, node: str, stopped: messages.Stopped) -> None:
        if stopped.port not in range(1, 1 << 16):
            raise ProtocolError(f"there is no port {stopped.port}")
        for outcome in stopped.outcomes:
            self._check_rank(node, outcome.rank)
            _check_times(outcome)
            self._check_failure(node, outcome.failure)

    def _check_finished(self, node: str, finished: messages.Finished) -> None:
        report = finished.report
        placed = self._nodes()[1].get(node)
        if placed is not None and (report.host, report.node_rank) != (placed.host, placed.node_rank):
            raise ProtocolError(f"node {node!r} is not node {report.node_rank} on host {report.host!r}")
        if placed is not None and [outcome.rank for outcome in report.outcomes] != list(placed.ranks):
            raise ProtocolError(f"node {node!r} does not report the outcomes of its ranks")
        if (
            report.error is not None
            or not report.passed
            or any(each.state not in _SUCCEEDED for each in report.outcomes)
        ):
            raise ProtocolError(f"node {node!r} has not succeeded")
        for outcome in report.outcomes:
            _check_times(outcome)
            self._check_failure(node, outcome.failure)
        if not all(map(math.isfinite, report.times.values())):
            raise ProtocolError("a time in the node's report is not finite")
        for rank in (*dict(finished.values), *finished.following):
            self._check_rank(node, rank)
        for rank, text in finished.values:
            try:
                base64.b64decode(text, validate=True)
            except ValueError as error:
                raise ProtocolError(f"the value of rank {rank} is not base64: {error}") from None

    def _is_new(self, node: str, warnings: messages.Warnings) -> bool:
        """Return whether to show these warnings now. They are not shown if they are too many or too long.

        No warning is lost, because the node's report at the end repeats all of them. A node sends its warnings again
        after a break of the connection; they do not count twice.
        """
        placed = self._nodes()[1].get(node)
        if placed is not None and warnings.host != placed.host:
            raise ProtocolError(f"node {node!r} is not on host {warnings.host!r}")
        _check_length("the name of a host", warnings.host, _LONGEST_NAME)
        known = self._warned.setdefault(node, set())
        if len(known | {*warnings.texts}) > _MOST_WARNINGS or any(
            len(text) > _LONGEST_WARNING for text in warnings.texts
        ):
            return False
        known.update(warnings.texts)
        return True


def _check_placement(nodes: tuple[Node, ...], world_size: int) -> None:
    """Check that the nodes have all ranks of the run, in order."""
    first = 0
    for number, node in enumerate(nodes):
        if (node.node_rank, node.first_rank) != (number, first) or not 0 <= node.local_world_size <= world_size:
            raise ProtocolError(f"node {number} of the placement is out of order")
        first += node.local_world_size
    if len({node.executor for node in nodes}) != len(nodes):
        raise ProtocolError("a node occurs twice in the placement")
    if first != world_size:
        raise ProtocolError(f"the placement has {first} ranks, but the run has {world_size}")
    for text in _texts(nodes):
        _check_length("a name in the placement", text, _LONGEST_NAME)


def _texts(nodes: Iterable[Node]) -> Iterable[str]:
    return (text for node in nodes for text in (node.executor, node.host, node.address, *node.gpus))


def _check_length(what: str, text: str, longest: int) -> None:
    if len(text) > longest:
        raise ProtocolError(f"{what} has {len(text)} characters, more than {longest}")


def _check_path(path: str) -> None:
    _check_length("the path of a file", path, _LONGEST_PATH)
    if "\0" in path or {"", ".", ".."} & {*path.split("/")}:
        raise ProtocolError(f"a file of a rank cannot have the path {path!r}")


def _check_number(what: str, number: int) -> None:
    if not 0 <= number <= _LARGEST:
        raise ProtocolError(f"{what} is {number}")


def _check_times(told: Message | Failure | Outcome) -> None:
    """Check that all times are finite, so that they can be compared."""
    for name, value in vars(told).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ProtocolError(f"{name} is {value}, which is not a finite number")


def _equal(left: str, right: str) -> bool:
    """Compare two texts in constant time."""
    return hmac.compare_digest(left.encode(errors="backslashreplace"), right.encode(errors="backslashreplace"))
