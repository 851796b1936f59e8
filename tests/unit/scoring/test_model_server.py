"""What the model's server says of a process that has ended."""

import glob
import os
import selectors
import signal
import socket
import tempfile
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch

from distributor.scoring.client import ModelClient, ModelOrder
from distributor.scoring.model_server import how_killed, ready
from distributor.scoring.predict import _pickled
from distributor.scoring.wire import ScoreRequest
from distributor.shipping.package import package_zip


@pytest.mark.parametrize(
    ("code", "oom", "words"),
    [
        (3, False, "ended with exit status 3"),
        (-11, True, "was killed by SIGSEGV"),
        (-9, False, "was killed by SIGKILL"),
    ],
)
def test_how_a_process_has_ended(code, oom, words):
    assert how_killed(code, oom) == words


def test_lack_of_memory_is_named_with_the_memory_that_there_is():
    text = how_killed(-9, True)
    assert "was killed by SIGKILL, most likely for lack of memory" in text
    assert "this machine or container has" in text
    assert "smaller batch_rows=" in text


def test_what_another_turn_has_closed_gets_none():
    with selectors.DefaultSelector() as selector:
        pairs = [socket.socketpair() for _ in range(2)]
        for ours, theirs in pairs:
            selector.register(ours, selectors.EVENT_READ)
            theirs.close()
        turns = 0
        for _ in ready(selector):
            turns += 1
            for ours, _ in pairs:
                selector.unregister(ours)
                ours.close()
        assert turns == 1


@contextmanager
def served(load, **options):
    """A task's connection to a model, whose server is told to end many times, and leaves nothing."""
    before = psutil.Process().children()
    order = ModelOrder(
        key=load.__qualname__, package=package_zip(), call=_pickled(load), keep=60, timeout=60, **options
    )
    client = ModelClient(order)
    try:
        yield client
    finally:
        (server,) = (each for each in psutil.Process().children() if each not in before)
        while server.status() != psutil.STATUS_ZOMBIE:
            server.send_signal(signal.SIGTERM)
        os.waitpid(server.pid, 0)
    assert glob.glob(f"{tempfile.gettempdir()}/{os.path.basename(client._folder)}*") == []


def answer(client):
    request = ScoreRequest({"x": np.ones((3, 1024), "float32")}, 3, ("y",), 3, False)
    ((_, found),) = client.answers([("first", request)])
    return found.outputs[0]


def test_a_server_that_is_told_to_end_many_times_leaves_nothing():
    with served(lambda: lambda batch: batch["x"], processes=2) as client:
        assert answer(client).shape == (3, 1024)


def test_one_process_computes_in_threads_after_a_load_that_did(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # Spark itself sets 1

    def load():
        module = torch.nn.Linear(1024, 1024)
        module.load_state_dict(module.state_dict())
        module(torch.ones(512, 1024))
        return lambda batch: module(torch.ones(512, 1024))[:3, 0] * 0 + torch.get_num_threads()

    with served(load, processes=1) as client:
        assert answer(client).tolist() == [2.0] * 3
