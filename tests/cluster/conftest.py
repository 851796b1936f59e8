"""A real standalone cluster over three hosts, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusters import CORES, ENVIRON, GPUS, Cluster
from hosts import Hosts, require
from leftovers import Leftovers
from sessions import Sessions


@pytest.fixture(scope="module")
def cluster(sessions: Sessions) -> Iterator[Cluster]:
    require()
    sessions.stop()
    with Hosts(
        tuple(CORES),
        cores=CORES,
        memory="3g",
        executor_memory="512m",
        shm={"host-b": "64m"},  # as much as containers have by default
        gpus=GPUS,
        environ=ENVIRON,
        conf={"spark.deploy.spreadOut": "false"},  # applications fill one host before the next
    ) as hosts:
        shared = Cluster(hosts)
        yield shared
        shared.stop()


@pytest.fixture
def leftovers(cluster: Cluster) -> Leftovers:
    """Tells what is left of the test's runs, on all hosts."""
    return Leftovers(map(cluster.hosts.temporary, CORES), map(cluster.hosts.memory, CORES))
