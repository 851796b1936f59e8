"""What local mode refuses before it starts anything."""

from __future__ import annotations

import pytest
from jobs import make_job

from distributor.errors import ConfigurationError
from distributor.machine import network
from distributor.schedulers.local import LocalScheduler


@pytest.mark.parametrize(
    ("reachable", "remedy"),
    [
        pytest.param((), "bring loopback up", id="down"),
        pytest.param(("::1",), "ip addr add 127.0.0.1/8 dev lo", id="only-ipv6"),
    ],
)
def test_without_an_ipv4_loopback_the_error_says_what_is_missing(
    reachable: tuple[str, ...], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "address_towards", lambda host: host if host in reachable else None)
    with pytest.raises(ConfigurationError, match=remedy):
        LocalScheduler().check(make_job())
