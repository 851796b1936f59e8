"""What of a run is noted for MLflow, which need not be installed here."""

from types import SimpleNamespace

import pytest

from distributor.tracking.mlflow import _Tracked
from distributor.tracking.mlflow_sender import LONGEST_TAG, SpoolDelivery
from distributor.tracking.spool import RunBegun, Spool


@pytest.fixture
def tracked(tmp_path):
    return _Tracked(SpoolDelivery(Spool.create(tmp_path, RunBegun("a", None, "a", 0.0, "/", "train"))), None)


def tags(tracked):
    """What is noted after the beginning."""
    return {name: text for entry in tracked.delivery.spool.read()[0][1:] for name, text in entry.tags.items()}


def test_of_a_placement_only_what_the_server_takes_is_noted(tracked):
    tracked.describe(SimpleNamespace(placement="host: rank\n" * 40_000, num_processes=40_000))
    found = tags(tracked)
    assert len(found["distributor.placement"]) == LONGEST_TAG
    assert found["distributor.num_processes"] == "40000"
