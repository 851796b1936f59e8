"""Decides which messages the driver accepts.

Who has no token gets nothing and learns nothing: the listener sees to that. Who has it is a rank, whose return value
the driver unpickles anyway, so nothing here looks for lies. What is attributed to a node needs the node's secret, which
ranks cannot read; only messages from before its agent connects, such as a task's facts, need none. The rest catches
mistakes and stale attempts, and bounds the driver's memory; the codec has checked types and bounds of fields.
A refusal ends its connection alone.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Iterator

from distributor.channel import proof
from distributor.channel.frames import MAX_BODY, ProtocolError, parse
from distributor.text import notices
from distributor.values import codec, messages
from distributor.values.messages import Message
from distributor.values.outcome import REPORTS, Log
from distributor.values.placement import Node, Placement, digest

_MOST_LOGGED = 10  # refusals

_MOST_WARNINGS = 64  # of one node, shown during the run; its report at the end repeats all
_LONGEST_WARNING = 16 << 10  # characters

_NAMES_PER_TASK = 4  # while nodes are unknown; more than one, since Spark may start tasks again as nodes of other names

#: Maximum number of bytes of a connection's first message.
_FIRST = 64 << 10
_FIRST_PER_TASK = 4 << 10

#: What a node sends after its hello.
_FROM_NODES = (
    Log,
    *(messages.Importing, messages.Started, messages.Beat, messages.Skipped, messages.StackDump, messages.Warnings),
    *(messages.Reached, messages.RankPreempted, messages.Halted, messages.Failed, messages.Stopped, messages.Finished),
    *(messages.SystemMetrics, messages.Keeping, messages.UnfitNode, messages.Dead, messages.Orphaned, messages.Bye),
)


class Validation:
    """Checks messages against what is known about the run's nodes, in the channel's thread only; raises ProtocolError.

    Made without arguments, it cannot check whether the run has the nodes and ranks that messages name. ``received``
    returns how many bytes of a rank's stream have arrived.
    """

    def __init__(
        self,
        label: str = "",
        tasks: int = 0,
        world_size: int | None = None,
        received: Callable[[int, int], int] | None = None,
    ) -> None:
        self._label = label
        self._tasks = tasks
        self._world_size = world_size
        #: ``None`` until the driver or, without its help, a node has placed the ranks.
        self.placement: Placement | None = None
        self._digest = ""
        self._nodes: dict[str, Node] = {}
        self._received = received
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
            notices.soon(notices.warn, f"{run}the driver ended a connection from {peer}, which {why}{last}")

    @property
    def names(self) -> Collection[str] | None:
        """The names of the run's nodes; ``None`` while they are not known."""
        return None if self.placement is None else self._nodes.keys()

    def place(self, placement: Placement, digest: str) -> None:
        """Use this placement, in place of that of tasks which Spark has started again."""
        self.placement, self._digest = placement, digest
        self._nodes = {node.executor: node for node in placement.nodes}

    def check_facts(self, facts: messages.TaskFacts) -> None:
        if facts.partition >= self._tasks:
            raise ProtocolError(f"a task reports that it runs partition {facts.partition}, which the run does not have")

    def check_importing(self, importing: messages.Importing) -> None:
        """Check which module a node imports. No secret: its task may send this before the agent connects."""
        if self._world_size is None:
            return
        if self.placement is not None and importing.node not in self._nodes:
            raise ProtocolError(
                f"node {importing.node!r} reports which module it is importing, but the run has no node of this name"
            )
        self._check_count(self._importing, importing.node)
        self._importing.add(importing.node)

    def check_failed_report(self, report: messages.FailedReport) -> None:
        """Check that the task of a node sends its report, also before the run's nodes are known."""
        if self.seal is None or not proof.holds(self.seal, report.node, report.secret):
            raise ProtocolError(
                f"the sender announces the report of node {report.node!r}, but does not prove with a secret that it is "
                "the task of this node"
            )

    def check_value(self, value: messages.Value) -> None:
        if not self._proves(value.node, value.secret):
            raise ProtocolError(
                f"the sender announces the return value of rank {value.rank}, but does not prove with a secret that it "
                "is a node of this run"
            )
        self._check_rank(value.node, value.rank)

    def check_node(self, message: messages.Upload | messages.Delete | messages.Fetch | messages.HeldStates) -> int:
        """Check that an agent of this run has sent a message, and return its node rank."""
        if message.node not in self._nodes or not self._proves(message.node, message.secret):
            raise ProtocolError(
                f"the sender sends a {type(message).__name__} message, but does not prove with a secret that it is a "
                "node of this run"
            )
        return self._nodes[message.node].node_rank

    def admit(self, hello: messages.Hello) -> None:
        """Register the node of a hello."""
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
        if not isinstance(message, _FROM_NODES):
            raise ProtocolError(f"a {type(message).__name__} message is not allowed after the node's first message")
        for rank in _ranks_in(message):
            self._check_rank(node, rank)
        match message:
            case Log():
                self._check_log(message)
            case messages.Importing():
                if message.node != node:
                    raise ProtocolError(
                        f"the node reports which module node {message.node!r} is importing, but may report this only "
                        "about itself"
                    )
                self.check_importing(message)
            case messages.Warnings():
                return self._is_new(node, message)
        return True

    def _proves(self, node: str, secret: str) -> bool:
        """Return whether the node has shown this secret in its hello.

        Without ``world_size``, the nodes are unknown, and an empty secret is accepted from a node without a hello.
        """
        known = node in self._secrets or self._world_size is None
        return known and _equal(self._secrets.get(node, ""), secret)

    def _ranks(self, name: str) -> range | None:
        """Return the ranks of a node; ``None`` while they are not known."""
        if self.placement is None:
            return None
        return self._nodes[name].ranks if name in self._nodes else range(0)

    def _check_placed(self, hello: messages.Hello, world_size: int) -> None:
        placement = self.placement
        if placement is None and hello.placement:
            placement = _placement(hello.placement, world_size)
        if placement is None:
            self._check_count(self._secrets, hello.node)
            return
        nodes = self._nodes if placement is self.placement else {node.executor for node in placement.nodes}
        if hello.node not in nodes:
            raise ProtocolError(f"the sender claims to be node {hello.node!r}, but the run has no node of this name")
        known = self._digest or digest(hello.placement)
        if hello.digest and hello.digest != known:
            raise ProtocolError(
                f"node {hello.node!r} has another placement of the ranks (sha256 {hello.digest[:16]!r}) than the run "
                f"({known[:16]!r}): it belongs to tasks that Spark has started at another time, or its facts differ"
            )
        if placement is not self.placement:
            self.place(placement, known)

    def _check_count(self, names: Collection[str], name: str) -> None:
        """Limit the names of unknown nodes."""
        if len(names) + (name not in names) > _NAMES_PER_TASK * max(1, self._tasks):
            raise ProtocolError(
                "the sender claims to be a further node, but more node names have been reported than this run can have"
            )

    def _check_rank(self, node: str, rank: int) -> None:
        ranks = self._ranks(node)
        if ranks is not None and rank not in ranks:
            raise ProtocolError(f"node {node!r} sends a message about rank {rank}, but does not run this rank")

    def _check_log(self, log: Log) -> None:
        if log.stream not in range(1, REPORTS + 1):
            raise ProtocolError(
                f"the node sends output of stream {log.stream}, which is not the number of stdout, stderr or another "
                "stream of a rank"
            )
        if self._received is not None and log.offset > (had := self._received(log.rank, log.stream)):
            raise ProtocolError(
                f"the node sends output of rank {log.rank} from byte {log.offset} on, but the driver has only the "
                f"bytes before {had}"
            )

    def _is_new(self, node: str, warnings: messages.Warnings) -> bool:
        """Return whether to show warnings now: not if they are too many or too long.

        The node's report at the end repeats all. Warnings that come again after a break of the connection count once.
        """
        known = self._warned.setdefault(node, set())
        if len(known | {*warnings.texts}) > _MOST_WARNINGS or any(
            len(text) > _LONGEST_WARNING for text in warnings.texts
        ):
            return False
        known.update(warnings.texts)
        return True


def _placement(text: str, world_size: int) -> Placement:
    """Return the placement that a node has computed, from its text."""
    try:
        nodes: tuple[Node, ...] = codec.build(tuple[Node, ...], parse(text.encode()))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the sender's list of nodes is none: {error}") from None
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
    return Placement(nodes)


def _ranks_in(message: Message | Log) -> Iterator[int]:
    """Yield the ranks about which a message of a node is."""
    match message:
        case Log(rank=int(rank)) | messages.Skipped(rank=int(rank)) | messages.StackDump(rank=int(rank)):
            yield rank
        case messages.Halted(rank=int(rank)) | messages.RankPreempted(rank=int(rank)):
            yield rank
        case messages.Failed(failure=failure) if failure is not None:
            yield failure.rank
        case messages.Stopped(outcomes=outcomes):
            yield from (outcome.rank for outcome in outcomes)
            yield from (outcome.failure.rank for outcome in outcomes if outcome.failure is not None)
        case messages.Finished(report=report, values=values, following=following):
            yield from (outcome.rank for outcome in report.outcomes)
            yield from (rank for rank, _ in values)
            yield from following


def _equal(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(errors="backslashreplace"), right.encode(errors="backslashreplace"))
