"""A cluster whose hosts can be cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hosts import Hosts, require
from sessions import Sessions


@pytest.fixture
def cluster(sessions: Sessions) -> Iterator[Hosts]:
    """Two hosts with a worker of two cores each; no session yet."""
    require()
    sessions.stop()
    with Hosts() as hosts:
        yield hosts
