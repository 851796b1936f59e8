"""A Spark task's end, where no server can be reached."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distributor.machine.folders import remove_stale
from distributor.scoring.client import ModelClient, ModelError, ModelOrder
from distributor.scoring.predict import _pickled
from distributor.scoring.row_memory import RowMemory
from distributor.scoring.wire import ProcessEnded, ScoreAnswer, ScoreRequest
from distributor.shipping.package import package_zip


def client_of(load, key):
    order = ModelOrder(key=key, package=package_zip(), call=_pickled(load), processes=1, keep=1.0, timeout=60.0)
    client = ModelClient(order)
    os.mkdir(client._folder, 0o755)  # others can read it: no place for a socket
    return client


def request(rows):
    return ScoreRequest({"x": np.arange(rows, dtype="float32")}, rows, ("y",), 4, False)


def test_the_worker_loads_the_model_itself_and_warns_once(caplog):
    def load():
        import builtins

        builtins.loads = getattr(builtins, "loads", 0) + 1
        return lambda batch: batch["x"] * 2 + builtins.loads

    client = client_of(load, "k1")
    try:
        with caplog.at_level(logging.WARNING, "distributor"):
            for _ in range(2):
                answers = list(client.answers([("first", request(3)), ("second", request(5))]))
                assert [name for name, _ in answers] == ["first", "second"]
                assert answers[1][1].outputs[0].tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
                client = ModelClient(client._order)
        (text,) = [each.getMessage() for each in caplog.records]
        assert "belongs to another user" in text
        assert "this worker loads it for itself" in text
    finally:
        os.rmdir(client._folder)


@pytest.mark.slow
def test_rows_for_which_there_is_no_memory_are_an_error(monkeypatch):
    def load():
        return lambda batch: batch["x"]

    def full(self, parts):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    order = ModelOrder(key="k4", package=package_zip(), call=_pickled(load), processes=1, keep=1.0, timeout=60.0)
    client = ModelClient(order)
    big = ScoreRequest({"x": np.zeros(1 << 16)}, 1 << 16, ("y",), 1 << 16, False)
    monkeypatch.setattr(RowMemory, "write", full)
    with pytest.raises(ModelError, match="65536 rows cannot be sent to the model: .*Cannot allocate memory"):
        list(client.answers([("first", big)]))


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_model_that_the_worker_cannot_load_is_an_error(error):
    def load():
        raise error("no weights")

    client = client_of(load, f"k2 {error}")
    try:
        words = rf"the model cannot be loaded: {error.__name__}: no weights \(.*in load\)"
        with pytest.raises(ModelError, match=words):
            list(client.answers([("first", request(3))]))
    finally:
        os.rmdir(client._folder)


@pytest.mark.parametrize("first", [None, ScoreAnswer(again=True)], ids=["ended", "failed"])
def test_rows_that_come_back_are_computed_alone(monkeypatch, first):
    """Else it would not be known whose rows of a batch are at fault, nor when to give up."""
    client = ModelClient(ModelOrder(key="k4", package=b"", call=b"", processes=1, keep=1.0, timeout=60.0))
    sent, found = [], iter([first, ScoreAnswer()])
    monkeypatch.setattr(client, "_send", sent.append)
    monkeypatch.setattr(client, "_answer", lambda: next(found))
    monkeypatch.setattr(client, "_ended", lambda: ProcessEnded("was killed by SIGKILL", was_computing=False))
    assert list(client.answers([("first", request(3))])) == [("first", ScoreAnswer())]
    assert [(each.rows, each.is_alone) for each in sent] == [(3, False), (3, True)]


def test_without_an_interpreter_that_can_be_started_the_worker_loads_the_model(monkeypatch):
    """Such as that of an archive that YARN has removed."""

    def load():
        return lambda batch: batch["x"]

    order = ModelOrder(key="k5", package=package_zip(), call=_pickled(load), processes=1, keep=1.0, timeout=60.0)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    client = ModelClient(order)
    ((_, found),) = client.answers([("first", request(3))])
    assert found.outputs[0].tolist() == [0, 1, 2]
    remove_stale()
    assert not os.path.exists(client._folder)


def test_the_folder_of_a_server_that_never_began_is_removed(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])  # what Python ignores
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(["true"], **options))
    order = ModelOrder(key="k3", package=b"", call=b"", processes=1, keep=1.0, timeout=60.0)
    client = ModelClient(order)
    with pytest.raises(ModelError, match="exit"):
        list(client.answers([("first", request(3))]))
    assert os.listdir(client._folder)
    remove_stale()
    assert not os.path.exists(client._folder)
