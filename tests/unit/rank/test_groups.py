"""Which keys process groups have in torch's store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distributor.rank import groups

WORLD = 4


def joined(*calls: tuple[str, int]) -> list[Any]:
    """The stores of groups that a rank joins one after another, each by a URL and with a number of ranks."""

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
        assert kwargs == {"timeout": 5}
        return iter([("store", rank, world_size)])

    module: Any = SimpleNamespace(rendezvous=rendezvous, PrefixStore=lambda prefix, store: (prefix, store))
    groups._separate(module, WORLD)
    stores = []
    for url, size in calls:
        store, rank, world_size = next(module.rendezvous(url, 3, size, timeout=5))
        assert (rank, world_size) == (3, size)
        stores.append(store if isinstance(store, str) else store[0])
    return stores


@pytest.mark.parametrize(
    ("calls", "stores"),
    [
        pytest.param([("env://", 4)], ["store"], id="the-first-has-torchs-own-keys"),
        pytest.param(
            [("env://", 4)] * 3, ["store", "distributor/group 1", "distributor/group 2"], id="each-has-its-own"
        ),
        pytest.param(
            [("env://", 4), ("env://", 2), ("env://", 2), ("env://", 4)],
            ["store", "distributor/group of 2 ranks", "distributor/group of 2 ranks", "distributor/group 1"],
            id="groups-of-some-ranks-do-not-count",
        ),
        pytest.param(
            [("tcp://localhost:1", 4), ("env://", 4), ("file:///f", 4), ("env://?use_libuv=0", 4)],
            ["store", "store", "store", "distributor/group 1"],
            id="stores-of-the-users-stay",
        ),
    ],
)
def test_keys_of_groups(calls: list[tuple[str, int]], stores: list[str]) -> None:
    assert joined(*calls) == stores
