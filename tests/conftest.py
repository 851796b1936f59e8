"""Fixtures: where a run goes, and how to make one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from sessions import LOCAL, MASTERS, Make, Sessions

from distributor import TorchDistributor

# Executors on this machine must run the Python that the package is tested with.
os.environ["PYSPARK_PYTHON"] = sys.executable


@pytest.fixture(scope="session")
def sessions() -> Iterator[Sessions]:
    if shutil.which("java") is None:
        pytest.skip("no Java here")
    pytest.importorskip("pyspark")
    shared = Sessions()
    yield shared
    shared.stop()


@pytest.fixture(scope="session", params=[pytest.param(master, marks=pytest.mark.spark) for master in MASTERS])
def spark_master(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def spark(spark_master: str, sessions: Sessions) -> Any:
    """A session on this machine's cores, then one with two executors of two cores."""
    return sessions.get(spark_master)


@pytest.fixture(
    scope="session",
    params=[LOCAL, pytest.param(MASTERS[-1], marks=pytest.mark.spark)],
)
def mode(request: pytest.FixtureRequest) -> str:
    """Where a run goes: this machine, or executors. For tasks in the driver's own JVM there is test_spark."""
    return str(request.param)


@pytest.fixture
def local(mode: str, request: pytest.FixtureRequest) -> bool:
    """Whether runs of the mode are on this machine; where not, its session is there."""
    if mode != LOCAL:
        request.getfixturevalue("sessions").get(mode)
    return mode == LOCAL


@pytest.fixture
def make(local: bool) -> Make:
    """Makes a distributor for the mode, on CPUs."""
    return lambda num_processes=2, **options: TorchDistributor(num_processes, local, False, **options)


@pytest.fixture
def make_local() -> Make:
    """Makes a distributor for this machine, on CPUs."""
    return lambda num_processes=2, **options: TorchDistributor(num_processes, True, False, **options)
