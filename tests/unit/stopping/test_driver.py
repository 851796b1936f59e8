"""All ranks stop at the same step, whatever becomes of the messages between the driver and the nodes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from distributor.stopping.driver import CoordinatedStop
from distributor.stopping.node import NodeStop
from distributor.stopping.rank import answer
from distributor.stopping.vote_file import NONE, Head, Vote, VoteFile
from distributor.values import messages
from distributor.values.messages import Agree, Halted, Propose, Reached

#: Seconds of simulated time after which a schedule has failed: far more than any needs.
LONG = 10_000.0


class World:
    """Nodes, ranks and a driver, with a network that loses and delays messages. Time is simulated.

    Args:
        seed: of all that is random.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.loss = self.random.choice([0.0, 0.1, 0.6])
        self.delay = self.random.choice([0.001, 0.1, 3.0])
        self.pace = self.delay * self.random.choice([0.1, 1.0, 20.0])
        self.stop_vote = CoordinatedStop()
        self.nodes = [Node(self, number) for number in range(self.random.randint(1, 4))]

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, call))

    def travel(self, call: Callable[[], None]) -> None:
        """Lets a message arrive some time, or never; messages may overtake each other."""
        if self.random.random() >= self.loss:
            self.after(self.random.uniform(0.0, self.delay), call)

    def order(self) -> None:
        for node in self.nodes:
            self.travel(lambda node=node, order=self.stop_vote.order: node.node_stop.on_order(order))  # type: ignore[misc]

    def repeat(self) -> None:
        self.order()
        self.after(3 * self.delay, self.repeat)

    def begin(self) -> None:
        self.stop_vote.begin(node.name for node in self.nodes)
        self.repeat()

    def hear(self, node: str, told: messages.Message) -> None:
        assert isinstance(told, Reached)
        if self.stop_vote.on_reached(node, told):
            self.order()

    def run(self) -> list[int]:
        """The steps at which ranks stop, once all have."""
        self.after(self.random.uniform(0.0, 20 * self.pace), self.begin)
        while any(NONE in node.halted for node in self.nodes):
            self.now, _, call = heapq.heappop(self._events)
            assert self.now < LONG
            call()
        return [step for node in self.nodes for step in node.halted]


class Memory(VoteFile):
    """A board that is no file, and therefore quick."""

    def __init__(self, ranks: int) -> None:
        super().__init__(Path("none"))
        self._head, self._seats = Head(), [Vote()] * ranks

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        yield

    def head(self) -> Head:
        return self._head

    def seats(self) -> list[Vote]:
        return self._seats

    def propose(self, step: int) -> None:
        self._head = replace(self._head, proposed=step)

    def agree(self, step: int) -> None:
        self._head = replace(self._head, agreed=step)

    def name_step(self, local_rank: int, step: int) -> None:
        self._seats[local_rank] = Vote(step)


class Node:
    """A node with ranks that name their steps, each at its own pace."""

    def __init__(self, world: World, number: int) -> None:
        ranks = world.random.randint(1, 3)
        self.world, self.name = world, str(number)
        self.vote_file = Memory(ranks)
        self.node_stop = NodeStop(self.vote_file, 0, 0, self._told, self._answered)
        self.halted = [NONE] * ranks
        for rank in range(ranks):
            world.after(world.random.uniform(0.0, 5 * world.pace), lambda rank=rank: self.step(rank, 1))  # type: ignore[misc]

    def _told(self, message: messages.Message) -> None:
        raise AssertionError(message)

    def _answered(self, message: messages.Message) -> None:
        self.world.travel(lambda: self.world.hear(self.name, message))

    def step(self, rank: int, step: int) -> None:
        with self.vote_file.locked():
            self.vote_file.name_step(rank, step)
            stops = answer(step, self.vote_file.head())
        if stops:
            self.halted[rank] = step
        elif stops is None:  # looks again
            self.world.after(self.world.pace / 5, lambda: self.step(rank, step))
        else:
            self.world.after(self.world.random.uniform(0.5, 1.5) * self.world.pace, lambda: self.step(rank, step + 1))


@pytest.mark.parametrize("begin", range(0, 1000, 100))
def test_all_ranks_stop_at_the_same_step(begin: int) -> None:
    """A thousand schedules."""
    for seed in range(begin, begin + 100):
        assert len({*World(seed).run()}) == 1, f"seed {seed}"


def test_nodes_agree_at_once_where_no_rank_has_begun() -> None:
    stop_vote = CoordinatedStop()
    assert not stop_vote.begun
    stop_vote.begin(["a", "b"])
    assert stop_vote.begun
    assert stop_vote.order == Propose(1, 0)
    assert not stop_vote.on_reached("a", Reached(1, True, NONE, attempt=0))
    assert stop_vote.on_reached("b", Reached(1, True, NONE, attempt=0))
    assert stop_vote.order == Agree(1, 0)


def test_each_proposal_is_further_ahead() -> None:
    stop_vote = CoordinatedStop()
    stop_vote.begin(["a", "b"])
    assert stop_vote.on_reached("a", Reached(1, False, 10, attempt=0))
    assert stop_vote.order == Propose(2, 11)
    assert not stop_vote.on_reached("b", Reached(1, False, 12, attempt=0)), "it is an answer to an earlier proposal"
    assert not stop_vote.on_reached("a", Reached(2, True, 10, attempt=0))
    assert stop_vote.on_reached("b", Reached(2, False, 12, attempt=0))
    assert stop_vote.order == Propose(3, 14)
    assert not stop_vote.on_reached("a", Reached(3, True, 12, attempt=0))
    assert not stop_vote.on_reached("c", Reached(3, True, 12, attempt=0)), "there is no such node"
    assert stop_vote.on_reached("b", Reached(3, True, 12, attempt=0))
    assert stop_vote.order == Agree(3, 14)
    assert not stop_vote.on_reached("b", Reached(3, False, 20, attempt=0)), "what all have accepted holds"


def test_ranks_that_stop_elsewhere_are_named() -> None:
    stop_vote = CoordinatedStop()
    assert stop_vote.on_halted(Halted(0, 7, attempt=0)) is None
    assert stop_vote.on_halted(Halted(2, 7, attempt=0)) is None
    told = stop_vote.on_halted(Halted(1, 9, attempt=0))
    assert told is not None
    assert told.startswith("ranks 0, 2 were told to stop at step 7, and rank 1 at step 9: ")
