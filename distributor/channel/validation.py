"""Decides which messages the driver accepts from processes that have the run's token.

Any rank can read the token, so it does not prove to which node a process belongs: the node's secret does. Only messages
from before the node's agent connects, such as a task's facts, need no secret. A refusal ends its connection alone.
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

_MOST_LOGGED = 10  # refusals

_MOST_WARNINGS = 64  # of one node, shown during the run; its report at the end repeats all

_NAMES_PER_TASK = 4  # while nodes are unknown; more than one, since Spark may start tasks again as nodes of other names

#: Maximum numbers of characters; stacks are those of one rank.
_LONGEST_NAME = 512
_LONGEST_PATH = 4096
_LONGEST_WARNING = 16 << 10
_LONGEST_STACKS = 512 << 10

#: Maximum number of bytes of a connection's first message.
_FIRST = 64 << 10
_FIRST_PER_TASK = 4 << 10

_LARGEST = 2**63 - 1

_STREAMS = range(1, REPORTS + 1)

_SUCCEEDED = ("finished", "unreturned")


class Validation:
    """Checks messages against what is known about the run's nodes, in the channel's thread only; raises ProtocolError.

    Made without arguments, it cannot check whether the run has the nodes and ranks that messages name. ``received``
    returns how many bytes of a rank's stream have arrived. ``skips``: nodes may leave out output if the driver is slow.
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
        #: Without a seal, the first secret that a node shows is accepted.
        self.seal: bytes | None = None
        self._importing: set[str] = set()
        self._warned: dict[str, set[str]] = {}
        self._refused = 0

    @property
    def first_limit(self) -> int:
        return min(MAX_BODY, _FIRST + _FIRST_PER_TASK * self._tasks)

    def log(self, peer: str, why: str) -> None:
        """Log why a connection was ended, for the first :data:`_MOST_LOGGED` ones."""
        self._refused += 1
        if self._refused <= _MOST_LOGGED:
            last = "; further ended connections are not logged" if self._refused == _MOST_LOGGED else ""
            run = f"run {self._label}: " if self._label else ""
            _log.warning("%sthe driver ended a connection from %s, which %s%s", run, peer, why, last)

    @property
    def names(self) -> Collection[str] | None:
        """The names of the run's nodes; ``None`` while they are not known."""
        placement, nodes = self._nodes()
        return None if placement is None else nodes.keys()

    def check_facts(self, told: messages.TaskFacts) -> None:
        if told.partition not in range(self._tasks):
            raise ProtocolError(f"a task reports that it runs partition {told.partition}, which the run does not have")
        _check_number("the task attempt ID that a task reports", told.attempt)
        _check_length(
            "the identifier that a task reports for the tasks that Spark started together",
            told.stage_attempt,
            _LONGEST_NAME,
        )

    def check_importing(self, told: messages.Importing) -> None:
        """Check which module a node imports. No secret: its task may send this before the agent connects."""
        _check_length("the name of the module that a node imports", told.module, _LONGEST_NAME)
        _check_length("the name of a node that imports a module", told.node, _LONGEST_NAME)
        if self._world_size is None:
            return
        if not 0 < told.nodes <= self._tasks:
            raise ProtocolError(
                f"a node reports that the run has {told.nodes} nodes, but the number must be from 1 to {self._tasks}, "
                "the run's number of tasks"
            )
        placement, nodes = self._nodes()
        if placement is not None and told.node not in nodes:
            raise ProtocolError(
                f"node {told.node!r} reports which module it is importing, but the run has no node of this name"
            )
        self._check_count({*self._importing, told.node})
        self._importing.add(told.node)

    def check_failed_report(self, told: messages.FailedReport) -> None:
        """Check that the task of a node sends its report, also before the run's nodes are known."""
        if self.seal is None or not proof.holds(self.seal, told.node, told.secret):
            raise ProtocolError(
                f"the sender announces the report of node {told.node!r}, but does not prove with a secret that it is "
                "the task of this node"
            )
        _check_number("the size of the report that a task announces", told.size)
        _check_number("the number of nodes that a task announces", told.nodes)

    def check_value(self, value: messages.Value) -> None:
        if not self._proves(value.node, value.secret):
            raise ProtocolError(
                f"the sender announces the return value of rank {value.rank}, but does not prove with a secret that it "
                "is a node of this run"
            )
        self._check_rank(value.node, value.rank)

    def check_node(self, told: messages.Upload | messages.Delete | messages.Fetch | messages.HeldStates) -> int:
        """Check that an agent of this run has sent a message, and return its node rank."""
        nodes = self._nodes()[1]
        if told.node not in nodes or not self._proves(told.node, told.secret):
            raise ProtocolError(
                f"the sender sends a {type(told).__name__} message, but does not prove with a secret that it is a node "
                "of this run"
            )
        return nodes[told.node].node_rank

    def check_upload(self, told: messages.Upload | messages.Delete) -> int:
        """Check a message about a file that ranks have written or removed, and return the sender's node rank."""
        node = self.check_node(told)
        path = told.path if isinstance(told, messages.Delete) else told.entry.path
        _check_path(path)
        if isinstance(told, messages.Upload) and told.uploaded is not None:
            _check_path(told.uploaded)
        if isinstance(told, messages.Upload):
            _check_number("the size that a node reports for a new file", told.entry.size)
            _check_number("the modification time that a node reports for a new file", told.entry.mtime_ns)
            if told.entry.mode & ~0o777:
                raise ProtocolError(
                    f"a node reports a new file with the mode {told.entry.mode:o}, but only octal modes from 0 to 777 "
                    "are allowed"
                )
        return node

    def admit(self, hello: messages.Hello) -> None:
        """Register the node of a hello."""
        _check_length("the name of a node that connects", hello.node, _LONGEST_NAME)
        _check_length("the secret of a node that connects", hello.secret, _LONGEST_NAME)
        if self.seal is not None and not proof.holds(self.seal, hello.node, hello.secret):
            raise ProtocolError(f"the sender claims to be node {hello.node!r}, but has no valid secret of this node")
        if not _equal(self._secrets.get(hello.node, hello.secret), hello.secret):
            raise ProtocolError(
                f"the sender claims to be node {hello.node!r}, but another process has already registered as this node "
                "with another secret"
            )
        if self._world_size is not None:
            self._check_placed(hello, self._world_size)
        self._secrets[hello.node] = hello.secret

    def forget(self, node: str) -> None:
        """Forget the secret of a lost node: Spark may start a node of the same name with another secret."""
        self._secrets.pop(node, None)

    def passes(self, node: str, message: Message | Log) -> bool:
        """Check a message, and return whether to pass it on: not so for warnings that are too many or too long."""
        match message:
            case Log():
                self._check_log(node, message)
            case messages.Beat():
                self._check_beat(node, message)
            case messages.Skipped():
                self._check_skipped(node, message)
            case messages.StackDump():
                _check_number("the request number in a node's message with stacks", message.number)
                _check_length("the text with the stacks of a rank", message.text, _LONGEST_STACKS)
                self._check_rank(node, message.rank)
            case messages.Failed():
                _check_times(message)
                self._check_failure(node, message.failure)
            case messages.Stopped():
                self._check_stopped(node, message)
            case messages.Finished():
                self._check_finished(node, message)
            case messages.Reached() | messages.RankPreempted() | messages.Halted():
                self._check_node_stop(node, message)
            case messages.Importing():
                if message.node != node:
                    raise ProtocolError(
                        f"the node reports which module node {message.node!r} is importing, but may report this only "
                        "about itself"
                    )
                self.check_importing(message)
            case messages.Warnings():
                return self._is_new(node, message)
            case messages.UnfitNode():
                _check_length("the host name that the node reports", message.host, _LONGEST_NAME)
                _check_length("the reason why the node cannot start", message.why, _LONGEST_WARNING)
            case messages.Started() | messages.Keeping() | messages.Dead() | messages.Orphaned() | messages.Bye():
                pass
            case _:
                raise ProtocolError(f"a {type(message).__name__} message is not allowed after the node's first message")
        return True

    def _proves(self, node: str, secret: str) -> bool:
        """Return whether the node has shown this secret in its hello.

        Without ``world_size``, the nodes are unknown, and an empty secret is accepted from a node without a hello.
        """
        known = node in self._secrets or self._world_size is None
        return known and _equal(self._secrets.get(node, ""), secret)

    def _nodes(self) -> tuple[Placement | None, dict[str, Node]]:
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
            raise ProtocolError(f"the sender claims to be node {hello.node!r}, but the run has no node of this name")
        if not nodes:
            self._check_count({*self._secrets, hello.node})

    def _check_count(self, names: set[str]) -> None:
        """Limit the names of unknown nodes."""
        if len(names) > _NAMES_PER_TASK * max(1, self._tasks):
            raise ProtocolError(
                "the sender claims to be a further node, but more node names have been reported than this run can have"
            )

    def _check_rank(self, node: str, rank: int) -> None:
        ranks = self._ranks(node)
        if ranks is not None and rank not in ranks:
            raise ProtocolError(f"node {node!r} sends a message about rank {rank}, but does not run this rank")

    def _check_log(self, node: str, log: Log) -> None:
        self._check_rank(node, log.rank)
        if log.stream not in _STREAMS:
            raise ProtocolError(
                f"the node sends output of stream {log.stream}, which is not the number of stdout, stderr or another "
                "stream of a rank"
            )
        if log.offset + len(log.data) > _LARGEST:
            raise ProtocolError(
                f"the node sends output that begins at byte {log.offset}, so that its end exceeds the largest signed "
                "64-bit integer"
            )
        if self._received is not None and log.offset > (had := self._received(log.rank, log.stream)):
            raise ProtocolError(
                f"the node sends output of rank {log.rank} from byte {log.offset} on, but the driver has only the "
                f"bytes before {had}"
            )

    def _check_skipped(self, node: str, skipped: messages.Skipped) -> None:
        self._check_rank(node, skipped.rank)
        if skipped.stream not in range(1, UNCAUGHT + 1):
            raise ProtocolError(
                f"the node reports that it has left out lines of stream {skipped.stream}, which is neither stdout, "
                "stderr nor the text of an uncaught exception"
            )
        _check_number("the number of output lines that the node has left out", skipped.lines)
        _check_number("the position of the output after the lines that the node has left out", skipped.offset)
        if not self._skips:
            raise ProtocolError(
                f"the node reports that it has left out output of rank {skipped.rank}, but the driver writes all "
                "output to log_dir, and must get all of it"
            )

    def _check_beat(self, node: str, beat: messages.Beat) -> None:
        ranks = self._ranks(node)
        if beat.alive < 0 or (ranks is not None and beat.alive > len(ranks)):
            raise ProtocolError(
                f"node {node!r} reports {beat.alive} running ranks, but the number must be from 0 to the node's number "
                "of ranks"
            )
        if beat.idle is not None and not 0 <= beat.idle < math.inf:
            raise ProtocolError(
                f"the node reports that its ranks have been idle for {beat.idle} s, which is negative or not finite"
            )

    def _check_node_stop(self, node: str, told: messages.Halting) -> None:
        if isinstance(told, messages.Reached):
            _check_number("the number of the proposal to which the node replies", told.number)
            _check_number("the highest step that the node reports", max(told.step, 0))
            return
        if told.rank is not None:
            self._check_rank(node, told.rank)
        if isinstance(told, messages.Halted):
            _check_number("the step at which a rank stops, as its node reports it,", told.step)

    def _check_failure(self, node: str, failure: Failure | None) -> None:
        if failure is not None:
            self._check_rank(node, failure.rank)
            _check_times(failure)

    def _check_stopped(self, node: str, stopped: messages.Stopped) -> None:
        if stopped.port not in range(1, 1 << 16):
            raise ProtocolError(f"the node reports that it listens at port {stopped.port}, which is no valid port")
        for outcome in stopped.outcomes:
            self._check_rank(node, outcome.rank)
            _check_times(outcome)
            self._check_failure(node, outcome.failure)

    def _check_finished(self, node: str, finished: messages.Finished) -> None:
        report = finished.report
        placed = self._nodes()[1].get(node)
        if placed is not None and (report.host, report.node_rank) != (placed.host, placed.node_rank):
            raise ProtocolError(
                f"node {node!r} reports node rank {report.node_rank} and host {report.host!r}, but has another node "
                "rank or host in this run"
            )
        if placed is not None and [outcome.rank for outcome in report.outcomes] != list(placed.ranks):
            raise ProtocolError(
                f"node {node!r} does not report exactly one outcome for each of its ranks, in the order of ranks"
            )
        if (
            report.error is not None
            or not report.passed
            or any(each.state not in _SUCCEEDED for each in report.outcomes)
        ):
            raise ProtocolError(
                f"node {node!r} sends final results, which a node may send only if all its ranks have succeeded, but "
                "its report says that they have not"
            )
        for outcome in report.outcomes:
            _check_times(outcome)
            self._check_failure(node, outcome.failure)
        if not all(map(math.isfinite, report.times.values())):
            raise ProtocolError("the node's final report contains a time that is not a finite number")
        for rank in (*dict(finished.values), *finished.following):
            self._check_rank(node, rank)
        for rank, text in finished.values:
            try:
                base64.b64decode(text, validate=True)
            except ValueError as error:
                raise ProtocolError(
                    f"the return value of rank {rank} in the node's message is not valid base64: {error}"
                ) from None

    def _is_new(self, node: str, warnings: messages.Warnings) -> bool:
        """Return whether to show warnings now: not if they are too many or too long.

        The node's report at the end repeats all. Warnings that come again after a break of the connection count once.
        """
        placed = self._nodes()[1].get(node)
        if placed is not None and warnings.host != placed.host:
            raise ProtocolError(f"node {node!r} sends warnings about host {warnings.host!r}, but runs on another host")
        _check_length("the host name in a node's warnings", warnings.host, _LONGEST_NAME)
        known = self._warned.setdefault(node, set())
        if len(known | {*warnings.texts}) > _MOST_WARNINGS or any(
            len(text) > _LONGEST_WARNING for text in warnings.texts
        ):
            return False
        known.update(warnings.texts)
        return True


def _check_placement(nodes: tuple[Node, ...], world_size: int) -> None:
    first = 0
    for number, node in enumerate(nodes):
        if (node.node_rank, node.first_rank) != (number, first) or not 0 <= node.local_world_size <= world_size:
            raise ProtocolError(
                f"the sender's list of nodes has a wrong node rank, first rank or number of ranks in entry {number}"
            )
        first += node.local_world_size
    if len({node.executor for node in nodes}) != len(nodes):
        raise ProtocolError("the sender's list of nodes contains a node twice")
    if first != world_size:
        raise ProtocolError(f"the sender's list of nodes has {first} ranks in total, but the run has {world_size}")
    for text in _texts(nodes):
        _check_length("a name, address or GPU in the sender's list of nodes", text, _LONGEST_NAME)


def _texts(nodes: Iterable[Node]) -> Iterable[str]:
    return (text for node in nodes for text in (node.executor, node.host, node.address, *node.gpus))


def _check_length(what: str, text: str, longest: int) -> None:
    if len(text) > longest:
        raise ProtocolError(f"{what} has {len(text)} characters, but at most {longest} are allowed")


def _check_path(path: str) -> None:
    _check_length("the path that a node reports for a file", path, _LONGEST_PATH)
    if "\0" in path or {"", ".", ".."} & {*path.split("/")}:
        raise ProtocolError(
            f"a node reports a file with the path {path!r}, but a path must be relative, without NULs and without "
            "parts that are empty, '.' or '..'"
        )


def _check_number(what: str, number: int) -> None:
    if not 0 <= number <= _LARGEST:
        raise ProtocolError(f"{what} is {number}, but must be a non-negative signed 64-bit integer")


def _check_times(told: Message | Failure | Outcome) -> None:
    for name, value in vars(told).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ProtocolError(f"the field '{name}' in the node's message is {value}, which is not a finite number")


def _equal(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(errors="backslashreplace"), right.encode(errors="backslashreplace"))
