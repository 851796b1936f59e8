"""The phases of nodes, and what follows from those of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distributor.run.nodes import Coming, Finishing, Gone, Nodes, Over, Phase, Resting, Up
from distributor.values.placement import Node, Placement

A = Node(0, "a", "host-a", "10.0.0.1", 1, 0, 0, 3)
B = Node(1, "b", "host-b", "10.0.0.2", 1, 3, 3, 1)


@pytest.fixture
def nodes() -> Nodes:
    """Two nodes that have said hello."""
    made = Nodes()
    for name in ("a", "b"):
        made.heard(name, 0.0)
    made.placement = Placement((A, B))
    return made


Step = Callable[[Nodes], object]


def start(name: str) -> Step:
    return lambda nodes: nodes.started(name)


def rest(name: str, port: int = 5000, *, unable: bool = False) -> Step:
    return lambda nodes: nodes.rests(name, port, unable=unable)


def end(name: str) -> Step:
    return lambda nodes: nodes.ended(name)


def lose(name: str) -> Step:
    return lambda nodes: nodes.lost(name)


def beat(alive: int, idle: float | None = None) -> Step:
    return lambda nodes: nodes.beat("a", alive, idle)


def finish(copies: bool) -> Step:
    return lambda nodes: nodes.keeps("a", copies)


@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        ([], Coming()),
        ([beat(0)], Coming()),
        ([start("a")], Up(3)),
        ([start("a"), beat(2, 1.5)], Up(2, 1.5)),
        ([start("a"), beat(2), start("a")], Up(2)),
        ([start("a"), rest("a", 7)], Resting(7, able=True)),
        ([rest("a", 7, unable=True)], Resting(7, able=False)),
        ([start("a"), rest("a"), beat(0)], Resting(5000, able=True)),
        ([start("a"), rest("a"), Nodes.again], Coming()),
        ([start("a"), finish(True)], Finishing(copies=True)),
        ([start("a"), rest("a"), finish(False)], Finishing(copies=False)),
        ([start("a"), end("a")], Over()),
        ([start("a"), end("a"), rest("a"), finish(True), Nodes.again], Over()),
        ([lose("a")], Gone(None)),
        ([start("a"), beat(2), lose("a")], Gone(2)),
        ([start("a"), rest("a"), lose("a")], Gone(0)),
        ([lose("a"), start("a"), beat(1), end("a")], Gone(None)),
        ([end("a"), lose("a")], Gone(None)),
    ],
)
def test_phases_of_a_node(steps: list[Step], phase: Phase, nodes: Nodes) -> None:
    for step in steps:
        step(nodes)
    assert nodes._phases["a"] == phase


@pytest.mark.parametrize(
    ("steps", "all_up", "all_gone", "all_rest", "next_port"),
    [
        ([], False, False, False, None),
        ([start("a"), start("a")], False, False, False, None),
        ([start("a"), start("b")], True, False, False, None),
        ([start("a"), end("a"), start("b")], True, False, False, None),
        ([end("a"), lose("b")], False, True, False, None),
        ([rest("b")], False, False, False, None),
        ([rest("b", 5001), rest("a", 5000)], False, False, True, 5000),
        ([rest("b", unable=True), rest("a")], False, False, True, None),
        ([rest("b"), lose("a")], False, False, True, None),
        ([rest("b"), rest("a"), finish(True)], False, False, False, None),
        ([rest("b"), rest("a"), Nodes.again], False, False, False, None),
    ],
)
def test_what_follows_from_the_phases_of_all(
    steps: list[Step], all_up: bool, all_gone: bool, all_rest: bool, next_port: int | None, nodes: Nodes
) -> None:
    for step in steps:
        step(nodes)
    assert (nodes.all_up, nodes.all_gone, nodes.all_rest, nodes.next_port) == (all_up, all_gone, all_rest, next_port)


def test_nothing_is_known_before_a_placement() -> None:
    nodes = Nodes()
    nodes.heard("a", 0.0)
    assert (nodes.known, nodes.up, nodes.ranks_up, nodes.all_up, nodes.all_gone) == (1, 0, 0, False, False)
    assert (nodes.ranks_of("a"), nodes.host_of(0), nodes.describe("a"), str(nodes)) == (range(0), "?", "a", "")
    assert not nodes.stalled("a", 1.0)


def test_ranks_are_up_until_their_node_has_ended_or_is_lost(nodes: Nodes) -> None:
    counts = []
    for step in (start("a"), start("b"), beat(2), end("a"), lose("b")):
        step(nodes)
        counts.append(nodes.ranks_up)
    assert counts == [3, 4, 3, 1, 0]


def test_files_are_copied_until_their_node_has_ended(nodes: Nodes) -> None:
    copies = []
    for step in (start("a"), finish(True), finish(False), finish(True), end("a")):
        step(nodes)
        copies.append(nodes.keeping)
    assert copies == [False, True, False, True, False]


def test_only_the_first_loss_of_a_node_counts(nodes: Nodes) -> None:
    assert [nodes.lost("b"), nodes.lost("b"), nodes.lost("a")] == [True, False, True]
    assert nodes.first_lost == "b"


def test_nodes_in_words(nodes: Nodes) -> None:
    assert (
        str(nodes) == "4 ranks on 2 nodes: node 0 on host-a (10.0.0.1): ranks 0-2; node 1 on host-b (10.0.0.2): rank 3"
    )
    assert nodes.describe("b") == "host-b (node 1, rank 3)"
    assert nodes.host_of(3) == "host-b"
    nodes.started("a")
    nodes.lost("a")
    nodes.lost("b")
    assert nodes.last_known("a", 2.0) == "; last known state, 2 s earlier: 3 ranks running"
    assert nodes.last_known("b", 2.0) == ""


def test_only_sixteen_of_many_nodes_are_written_out() -> None:
    nodes = Nodes()
    nodes.placement = Placement(
        tuple(Node(rank, str(rank), f"h{rank}", "10.0.0.1", 1, rank, rank, 1) for rank in range(20))
    )
    assert str(nodes).startswith("20 ranks on 20 nodes: node 0 on h0 ")
    assert str(nodes).endswith("node 15 on h15 (10.0.0.1): rank 15; and 4 more")


def test_a_stall_takes_two_heartbeats_of_each_node(nodes: Nodes) -> None:
    def beats(name: str, idle: float) -> bool:
        nodes.beat(name, 1, idle)
        return nodes.stalled(name, 10.0)

    nodes.started("a")
    nodes.started("b")
    assert not beats("a", 11)  # nothing is known of b
    assert not beats("b", 11)  # all are idle
    assert not beats("a", 12)
    assert not beats("b", 0.1)  # it was waiting for something, and has gone on
    assert not beats("a", 13)
    assert not beats("b", 11)
    assert not beats("b", 12)
    assert beats("a", 14)  # all are idle, and were so at b's last heartbeat


def test_nodes_without_living_ranks_prevent_no_stall_and_are_none(nodes: Nodes) -> None:
    nodes.started("a")
    nodes.started("b")
    nodes.beat("b", 0, None)
    assert not nodes.stalled("b", 10.0)
    for idle in (11, 12):
        nodes.beat("a", 3, idle)
        assert not nodes.stalled("a", 10.0)
    assert nodes.stalled("b", 10.0)
    nodes.beat("a", 0, None)
    assert not nodes.stalled("a", 10.0)


def test_a_node_that_has_ended_prevents_no_stall(nodes: Nodes) -> None:
    nodes.started("a")
    nodes.started("b")
    nodes.beat("b", 1, 0.0)
    nodes.ended("b")
    nodes.beat("a", 3, 11)
    assert [nodes.stalled("a", 10.0), nodes.stalled("a", 10.0)] == [False, True]
