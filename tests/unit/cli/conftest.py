"""What tests of the command line share."""

from __future__ import annotations

import sys

import pytest
from fake_distributor import Fake

from distributor.cli import command


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr(command, "Distributor", Fake)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"):
        monkeypatch.delenv(name, raising=False)
    return Fake
