"""Which keys process groups have in torch's store."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from distributor.errors import ConfigurationError
from distributor.rank import groups

WORLD = 4
MEETS_AT = ("10.0.0.1", "4711")
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}


def joined(*calls: tuple[str, int]) -> list[Any]:
    """The stores of groups that a rank joins one after another, each by a URL and with a number of ranks."""

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
        assert kwargs == {"timeout": 5}
        return iter([("store", rank, world_size)])

    module: Any = SimpleNamespace(rendezvous=rendezvous, PrefixStore=lambda prefix, store: (prefix, store))
    groups._separate(module, WORLD, MEETS_AT)
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


@pytest.mark.parametrize(
    ("url", "changed", "asked"),
    [
        ("env://", {}, None),
        ("env://", {"MASTER_PORT": "12355"}, ("10.0.0.1", "12355")),
        ("env://", {"MASTER_ADDR": "localhost"}, ("localhost", "4711")),
        ("tcp://10.0.0.1:4711?rank=0&world_size=4", {}, None),
        ("tcp://localhost:23456", {}, ("localhost", "23456")),
        ("tcp://localhost:23456", {"TORCHELASTIC_USE_AGENT_STORE": "False"}, None),
        ("file:///shared/store", {"MASTER_PORT": "12355"}, None),
    ],
)
def test_an_address_of_the_code_is_told_from_that_of_the_run(
    url: str, changed: dict[str, str], asked: groups.Address | None
) -> None:
    assert groups.elsewhere(url, {**AGENT, **changed}, MEETS_AT) == asked


def test_an_address_at_which_nobody_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AGENT.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # nobody else gets this port, and nobody listens
        url = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=r"meet at 10\.0\.0\.1:4711, .* Leave out the lines"):
            joined((url, WORLD))
        reserved.listen()  # as a store of the user's would
        assert joined((url, WORLD)) == ["store"]
