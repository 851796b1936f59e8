"""A driver's end of the channel, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from listeners import Listener

from distributor.channel.server import ChannelServer
from distributor.values.plan import Endpoint


@pytest.fixture
def served() -> Iterator[tuple[Listener, ChannelServer, Endpoint]]:
    listener = Listener()
    with ChannelServer(listener) as server:
        yield listener, server, server.listen("127.0.0.1", "127.0.0.1")
