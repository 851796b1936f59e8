"""A cluster whose hosts can be cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hosts import Hosts, why_not
from sessions import Sessions


@pytest.fixture
def cluster(sessions: Sessions) -> Iterator[Hosts]:
    """Two hosts with a worker of two cores each; no session yet."""
    if reason := why_not():
        pytest.skip(reason)
    sessions.stop()
    with Hosts() as hosts:
        yield hosts
