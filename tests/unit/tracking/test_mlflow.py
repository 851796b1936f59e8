"""What of a run is noted for MLflow, which need not be installed here."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from distributor.metrics.rank import DATA_WAIT
from distributor.metrics.table import TrackedRow
from distributor.tracking import mlflow_model
from distributor.tracking.mlflow import _Tracked
from distributor.tracking.mlflow_sender import LONGEST_TAG, SpoolDelivery
from distributor.tracking.spool import RunBegun, Spool
from distributor.values.checkpoints import Checkpoints


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


def test_what_rank_0_has_logged_is_left_out_only_where_it_logs(tracked):
    """With a callback for each of two servers, rank 0 joins the run of one."""
    for tracked.is_joined in (True, False):
        tracked.report([TrackedRow(0, 1, 0.0, 0, {"loss": 1.0, DATA_WAIT: 2.0})])
    assert [entry.values for entry in tracked.delivery.spool.read()[0][1:]] == [
        {DATA_WAIT: 2.0},
        {"loss": 1.0, DATA_WAIT: 2.0},
    ]


def test_no_password_of_a_url_is_noted(tracked):
    tracked.tag({"distributor.checkpoint": "sftp://me:pw@host/kept/step-8", "distributor.error": "no sftp://:p@w@host"})
    assert tags(tracked) == {
        "distributor.checkpoint": "sftp://me@host/kept/step-8",
        "distributor.error": "no sftp://@host",
    }


def test_a_container_of_azures_stays(tracked):
    tracked.tag({"distributor.checkpoint": "abfss://data@account.dfs.core.windows.net/kept/step-8"})
    assert tags(tracked) == {"distributor.checkpoint": "abfss://data@account.dfs.core.windows.net/kept/step-8"}


def test_a_registered_model_names_its_checkpoint_without_a_password(monkeypatch):
    monkeypatch.setattr(mlflow_model, "load_module", lambda *_: "sftp://me:pw@host/kept/step-8")
    monkeypatch.setattr(mlflow_model, "log_files", lambda *_: None)
    monkeypatch.setattr(mlflow_model, "_add_version", lambda *_: "1")
    monkeypatch.setattr(mlflow_model.Registration, "_save", lambda *_: None)
    client = Mock(search_model_versions=lambda _: [])
    registration = mlflow_model.Registration("digits", lambda: torch.nn.Linear(1, 1))
    registration.register(client, "abc", Checkpoints("sftp://me:pw@host/kept"))
    client.set_tag.assert_called_once_with("abc", "distributor.registered", "digits 1, of sftp://me@host/kept/step-8")


def test_no_version_takes_the_folder_of_another():
    versions = [SimpleNamespace(source=f"mlflow-artifacts:/0/abc/artifacts/{name}") for name in ("model", "model-3")]
    client = Mock(search_model_versions={"run_id='abc'": versions, "run_id='new'": []}.get)
    assert [mlflow_model._unused(client, run) for run in ("abc", "new")] == ["model-2", "model"]
