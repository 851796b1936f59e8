"""What the driver makes of what nodes tell."""

from __future__ import annotations

import pytest

from distributor.run.nodes import Nodes
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


def test_before_anybody_has_told() -> None:
    nodes = Nodes()
    nodes.heard("a", 0.0)
    assert nodes.placement is None
    assert (nodes.known, nodes.up, nodes.ranks_up, nodes.all_up, nodes.all_gone) == (1, 0, 0, False, False)
    assert (nodes.ranks_of("a"), nodes.host_of(0), nodes.describe("a"), nodes.last_known("a", 0.0)) == (
        range(0),
        "?",
        "a",
        "",
    )
    assert str(nodes) == ""
    assert not nodes.stalled("a", 1.0)


def test_who_is_up(nodes: Nodes) -> None:
    nodes.started("a")
    assert (nodes.up, nodes.all_up, nodes.ranks_up) == (1, False, 3)
    nodes.started("b")
    assert (nodes.up, nodes.all_up, nodes.ranks_up) == (2, True, 4)
    nodes.beat("a", 2, None)
    assert nodes.ranks_up == 3
    nodes.ended("a")
    assert nodes.ranks_up == 1


def test_who_is_gone(nodes: Nodes) -> None:
    assert not nodes.all_gone
    nodes.ended("a")
    assert nodes.lost("b")
    assert not nodes.lost("b")
    assert nodes.all_gone


def test_who_rests_or_is_gone(nodes: Nodes) -> None:
    assert not nodes.all_rest
    nodes.rests("a", 5000)
    assert not nodes.all_rest
    nodes.rests("b", 5001)
    assert nodes.all_rest
    nodes.lost("b")
    assert nodes.all_rest
    nodes.again()
    assert not nodes.all_rest


def test_words(nodes: Nodes) -> None:
    assert (
        str(nodes) == "4 ranks on 2 nodes: node 0 on host-a (10.0.0.1): ranks 0-2; node 1 on host-b (10.0.0.2): rank 3"
    )
    assert nodes.describe("b") == "host-b (node 1, rank 3)"
    assert nodes.host_of(3) == "host-b"
    nodes.started("a")
    assert nodes.last_known("a", 0.0) == "; last known state, 0 s earlier: 3 ranks running"


def test_many_nodes_in_bearable_length() -> None:
    nodes = Nodes()
    nodes.placement = Placement(
        tuple(Node(rank, str(rank), f"h{rank}", "10.0.0.1", 1, rank, rank, 1) for rank in range(20))
    )
    assert str(nodes).startswith("20 ranks on 20 nodes: node 0 on h0 ")
    assert str(nodes).endswith("node 15 on h15 (10.0.0.1): rank 15; and 4 more")


def test_a_stall_takes_two_heartbeats_of_each(nodes: Nodes) -> None:
    def beat(name: str, idle: float, alive: int = 1) -> bool:
        nodes.beat(name, alive, idle)
        return nodes.stalled(name, 10.0)

    assert not beat("a", 11)  # nothing is known of b
    assert not beat("b", 11)  # all are idle
    assert not beat("a", 12)
    assert not beat("b", 0.1)  # it was waiting for something, and has gone on
    assert not beat("a", 13)
    assert not beat("b", 11)
    assert not beat("b", 12)
    assert beat("a", 14)  # all are idle, and were so when b had told before


def test_nodes_without_ranks_do_nothing_and_stall_nobody(nodes: Nodes) -> None:
    nodes.beat("b", 0, None)
    for idle, stalled in ((11, False), (12, False)):
        nodes.beat("a", 3, idle)
        assert nodes.stalled("a", 10.0) is stalled
    assert nodes.stalled("b", 10.0)
    nodes.beat("a", 3, 0.0)
    assert not nodes.stalled("a", 10.0)
