"""What an agent concludes from how its ranks end."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from distributor.channel.rank_slots import RankSlots, Slot
from distributor.node.ranks import Ranks
from distributor.stopping.node import NodeStop
from distributor.stopping.vote_file import VoteFile
from distributor.values.messages import RankExited, RanksStarted
from distributor.values.outcome import Ending, Outcome

UNHEARD = NodeStop(VoteFile(Path("none")), 0, 0, print, print)


@pytest.mark.parametrize(
    ("exits", "succeeded"),
    [
        pytest.param((RankExited(0, 0, None, 1.0), RankExited(1, 0, None, 1.0)), True, id="all-have-returned"),
        pytest.param((RankExited(0, 0, None, 1.0),), False, id="one-is-alive"),
        pytest.param((RankExited(0, 0, None, 1.0), RankExited(1, 1, None, 1.0)), False, id="one-has-failed"),
        pytest.param((RankExited(0, 0, None, 1.0), RankExited(1, 0, 0.5, 1.0)), False, id="one-was-stopped"),
        pytest.param((), False, id="all-are-alive"),
    ],
)
def test_whether_all_ranks_have_succeeded(exits: tuple[RankExited, ...], succeeded: bool) -> None:
    ranks = Ranks(RankSlots(2), UNHEARD)
    assert not ranks.succeeded
    ranks.note(RanksStarted((4711, 4712), 0.5))
    for each in exits:
        ranks.note(each)
    assert ranks.succeeded == succeeded
    ranks.slots.close()


def test_a_node_without_ranks_succeeds_with_the_others_only() -> None:
    ranks = Ranks(RankSlots(0), UNHEARD)
    ranks.note(RanksStarted((), 0.5))
    assert not ranks.succeeded
    ranks.slots.close()


def test_a_rank_that_is_writing_is_telling_something() -> None:
    ranks = Ranks(RankSlots(1), UNHEARD)
    assert not ranks.tells(0)
    slot = Slot(ranks.slots.descriptor, 0)
    for known in ("type", "text", "all"):
        slot.write(pickle.dumps(Ending(Outcome(0, "host", "failed"), 1.0, known=known)))  # type: ignore[arg-type]
        assert ranks.tells(0) == (known != "all")
    os.pwrite(ranks.slots.descriptor, b"\xff" * 8, 0)
    assert ranks.tells(0)
    ranks.slots.close()
