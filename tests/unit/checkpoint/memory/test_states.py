"""Which state in memory all ranks load and from which nodes, which is overwritten, and where its copy goes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("torch")

from distributor.checkpoint.memory.states import (
    Generation,
    Holding,
    InMemory,
    MemoryOffer,
    Piece,
    Seat,
    Source,
    choose,
    is_newer,
    oldest,
    peer_of,
    sources,
)
from distributor.checkpoint.records import folder_name, step_of
from distributor.values import codec


def piece(name: str, offset: int = 0, *, whole: bool = True, size: int = 8) -> Piece:
    return Piece(name, "float32", (2,), (2,) if whole else (4,), whole, offset, size)


def state(step: int, *pieces: Piece, others: tuple[str, ...] = (), ranks: int = 2) -> Generation:
    return Generation(folder_name(step, "3f2a-0", step), step, ranks, pieces, others)


def held(node: int, rank: int, generation: Generation) -> Holding:
    return Holding(node, rank, f"/dev/shm/{node}/{rank}-{generation.step % 2}", 5, generation)


def test_a_copy_leaves_out_what_a_lower_rank_has() -> None:
    whole = state(1, piece("a", 0), piece("b", 64, size=100), piece("c", 192), others=("d",))
    copy, parts = whole.without({"a", "x"})
    assert [(each.name, each.offset) for each in copy.pieces] == [("b", 0), ("c", 128)]
    assert parts == [(64, 128), (192, 64)]
    assert copy.others == ("a", "d")
    assert whole.without(())[0].pieces == whole.pieces


def test_the_copy_is_on_another_host_if_there_is_one() -> None:
    one_host = [Seat("a", 0, "one"), Seat("b", 1, "one"), Seat("c", 2, "one")]
    assert [peer_of(seat, one_host) for seat in one_host] == [one_host[1], one_host[2], one_host[0]]
    assert peer_of(one_host[0], [one_host[0]] * 2) is None
    four = [Seat(str(node), node, "one" if node < 2 else "two") for node in range(4)]
    assert [found.node for seat in four if (found := peer_of(seat, four))] == [2, 2, 0, 0]


def test_a_lost_node_is_replaced_by_the_copy() -> None:
    """Rank 0's node is lost. A tensor that both had in full comes from rank 0's copy, for both ranks."""
    first = state(1, piece("w"), piece("part", 64, whole=False))
    second, _ = state(1, piece("w"), piece("part", 64, whole=False)), None
    holdings = [held(1, 1, second), held(1, 0, first)]
    found = sources(holdings, [0, 1])
    assert found is not None
    checkpoint, (zero, one) = found
    assert step_of(checkpoint) == 1
    assert zero == (Source(1, "/dev/shm/1/0-1", first.pieces, 5),)
    assert one == (Source(1, "/dev/shm/1/1-1", second.pieces, 5),)


def test_what_a_copy_lacks_comes_from_the_lowest_rank() -> None:
    """Rank 1's node is lost, and rank 1 starts on a node that holds nothing."""
    zero, two = state(1, piece("w"), ranks=3), state(1, piece("w"), ranks=3)
    one = state(1, piece("part", whole=False), others=("w",), ranks=3)
    found = sources([held(0, 0, zero), held(2, 2, two), held(2, 1, one)], [0, 1, 2])
    assert found is not None
    assert found[1][1] == (Source(2, "/dev/shm/2/1-1", one.pieces, 5), Source(0, "/dev/shm/0/0-1", zero.pieces))


def test_a_ranks_own_node_comes_first() -> None:
    zero, one = state(1, piece("w")), state(1, others=("w",))
    copy = state(1, piece("w"))
    found = sources([held(0, 0, zero), held(1, 1, one), held(1, 0, copy)], [0, 1])
    assert found is not None
    assert [source.node for source in found[1][0]] == [0]
    assert [source.node for source in found[1][1]] == [1, 1]


def test_a_state_of_which_a_part_is_missing_is_passed_over() -> None:
    """So is a state of another number of ranks."""
    old, new = state(1, piece("w")), state(2, piece("w"))
    other = state(3, piece("w"), ranks=1)
    holdings = [held(0, 0, old), held(0, 0, new), held(1, 1, old), held(0, 0, other)]
    found = sources(holdings, [0, 1])
    assert found is not None and step_of(found[0]) == 1
    assert sources([held(0, 0, new), held(1, 1, state(2, others=("gone",)))], [0, 1]) is None
    assert sources([], [0, 1]) is None


def test_offers_and_choices_are_read_as_they_were_written() -> None:
    offer = MemoryOffer(("a",), Seat("a", 1), (held(1, 0, state(1, piece("w"), others=("x",))),))
    assert codec.read(MemoryOffer, codec.pack(offer)) == offer
    some = (Source(1, "/dev/shm/a", (piece("w"),), 5), Source(0, "/dev/shm/b", (piece("x"),)))
    for chosen in (InMemory("step-1-3f-0-1"), InMemory("step-1-3f-0-1", some, (Seat("a", 1),))):
        assert codec.read(InMemory, codec.pack(chosen)) == chosen


def test_chooses_the_newest_state_of_all_ranks() -> None:
    first, second = (folder_name(step, "3f2a-0", step) for step in (1, 2))
    assert choose([MemoryOffer((first, second)), MemoryOffer((first,))]) == [InMemory(first)] * 2
    assert choose([MemoryOffer((first,)), MemoryOffer()]) is None
    seats = [Seat(str(node), node, f"host-{node}") for node in range(2)]
    holdings = tuple(held(node, node, state(2, piece("w"))) for node in range(2))
    chosen = choose(
        [MemoryOffer(seat=seats[0], holdings=holdings[:1]), MemoryOffer(seat=seats[1], holdings=holdings[1:])]
    )
    assert chosen is not None
    assert [(each.step, each.seats) for each in chosen] == [(2, tuple(seats))] * 2
    assert [source.node for each in chosen for source in each.sources or ()] == [0, 1]
    assert choose([MemoryOffer(seat=seats[0], holdings=holdings[:1]), MemoryOffer(seat=seats[1])]) is None


def name(step: int, attempt: int = 0, run: str = "3f2a") -> str:
    return folder_name(step, f"{run}-{attempt}", step)


def test_the_loaded_state_is_overwritten_last() -> None:
    first, second = (Generation(name(step), step, 2, (), ()) for step in (1, 2))
    assert oldest([first, second], None) == 0
    assert oldest([first, second], name(1)) == 1
    assert oldest([first, None], name(2)) == 1


@pytest.mark.parametrize(
    ("kept", "committed", "newer"),
    [
        (name(5), None, True),
        (name(5), name(5), True),
        (name(1, 1), name(5, 0), True),
        (name(5), name(6), False),
        (name(5), name(9, run="77aa"), True),
    ],
)
def test_a_state_is_newer_than_earlier_checkpoints(kept: str, committed: str | None, newer: bool) -> None:
    assert is_newer(kept, committed) == newer


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.data())
def test_the_loss_of_any_node_leaves_a_state(nodes: int, data: st.DataObject) -> None:
    """Each node has one rank, with one tensor that all have in full, and one of its own. Copies may lag by one save."""
    seats = [Seat(str(node), node, f"host-{node}") for node in range(nodes)]
    lost = data.draw(st.integers(0, nodes - 1))
    new = [data.draw(st.booleans()) for _ in range(nodes)]
    holdings = []
    for step, seat in itertools.product((1, 2), seats):
        whole = state(step, piece("w"), piece(f"own-{seat.node}", 64, whole=False), ranks=nodes)
        if seat.node != lost:
            holdings.append(held(seat.node, seat.node, whole))
        peer = peer_of(seat, seats)
        assert peer is not None
        if peer.node != lost and (step == 1 or new[seat.node]):
            copy, _ = whole.without({"w"} if seat.node else ())
            holdings.append(held(peer.node, seat.node, copy))
    found = sources(holdings, range(nodes))
    assert found is not None
    assert step_of(found[0]) == (2 if new[lost] else 1)
    for rank, parts in enumerate(found[1]):
        assert {each.name for part in parts for each in part.pieces} == {"w", f"own-{rank}"}
        assert all(part.node != lost for part in parts)
