"""What the model's server says of a process that has ended."""

import fcntl
import glob
import io
import os
import random
import selectors
import signal
import socket
import struct
import tempfile
import threading
import zipfile
from contextlib import contextmanager, suppress

import numpy as np
import psutil
import pytest
import torch
import watch

from distributor.machine import bootstrap, folders, model_servers
from distributor.scoring.client import ModelClient, ModelError, ModelOrder
from distributor.scoring.model_server import SEVERAL, _Client, _Server, _Worker, how_killed, ready
from distributor.scoring.predict import _pickled
from distributor.scoring.wire import ENDED, ProcessEnded, ScoreRequest, receive
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


def server_of(client):
    """The process that listens in a task's folder."""
    with model_servers.connect(client._folder, b"nothing") as connection:
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return psutil.Process(pid)


@contextmanager
def served(load, **options):
    """A task's connection to a model, whose server is told to end many times, and leaves nothing."""
    options = {"package": package_zip(), "timeout": 60, **options}
    order = ModelOrder(key=load.__qualname__, call=_pickled(load), keep=60, **options)
    client = ModelClient(order)
    try:
        yield client
    finally:
        with suppress(FileNotFoundError, ConnectionRefusedError, psutil.NoSuchProcess):  # it has ended by itself
            server = server_of(client)
            while server.status() != psutil.STATUS_ZOMBIE:
                server.send_signal(signal.SIGTERM)
            with suppress(ChildProcessError):
                os.waitpid(server.pid, 0)
    watch.until(lambda: not glob.glob(f"{tempfile.gettempdir()}/{os.path.basename(client._folder)}*"))


def answer(client, value=1.0):
    request = ScoreRequest({"x": np.full((3, 1024), value, "float32")}, 3, ("y",), 3, False)
    ((_, found),) = client.answers([("first", request)])
    return found.outputs[0]


@pytest.mark.slow
def test_a_server_that_is_told_to_end_many_times_leaves_nothing():
    with served(lambda: lambda batch: batch["x"], processes=2) as client:
        assert answer(client).shape == (3, 1024)


def test_a_warm_process_forks_all_servers_and_they_outlive_it():
    def load():
        import distributor.scoring.model_process as preloaded

        kept = preloaded.__dict__.setdefault("_seen", [])
        kept.append(0)
        return lambda batch: batch["x"][:, 0] * len(kept)

    with served(load, processes=1) as client:
        answer(client)
        first = server_of(client)
        with served(lambda: load(), processes=1) as other:
            assert answer(other).tolist() == [1.0] * 3  # nothing of the other model
            second = server_of(other)
            assert first.parent() == second.parent()
            assert bootstrap.is_part(first.ppid(), "warm")
            first.parent().kill()
            for each in (client, other):
                assert answer(each).tolist() == [1.0] * 3
            assert first.is_running() and second.is_running()


@pytest.mark.slow
def test_without_a_warm_process_the_server_starts_alone():
    broken = io.BytesIO(package_zip())
    with zipfile.ZipFile(broken, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("distributor/node/warm.py", "raise ImportError")
    with served(lambda: lambda batch: batch["x"], package=broken.getvalue(), processes=1) as client:
        assert answer(client).shape == (3, 1024)
        assert not bootstrap.is_part(server_of(client).ppid(), "warm")


def test_the_first_task_hears_of_a_load_that_failed_before_it_came():
    def load():
        raise RuntimeError("no weights")

    options = {"package": package_zip(), "call": _pickled(load), "keep": 60, "timeout": 60, "processes": 1}
    client = ModelClient(ModelOrder(key="fails", **options))
    folders.make_private(client._folder)
    path = os.path.join(client._folder, model_servers.LOCK)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert client._start(lock).wait() == 0
    with open(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the server listens
    psutil.wait_procs(server_of(client).children())
    with pytest.raises(ModelError, match="RuntimeError: no weights"):
        answer(client)


def test_what_the_loader_has_printed_is_in_the_error():
    def load():
        print("no licence")
        os._exit(4)

    order = ModelOrder(key="prints", package=package_zip(), call=_pickled(load), keep=60, timeout=60, processes=1)
    with pytest.raises(ModelError, match=r"its process with exit status 4\. It has written:\nno licence$"):
        answer(ModelClient(order))


@pytest.mark.slow
def test_each_process_gets_its_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    with served(lambda: lambda batch: batch["x"][:, 0] * 0 + torch.get_num_threads(), processes=1) as client:
        assert answer(client).tolist() == [float(cores)] * 3
    with served(lambda: lambda batch: batch["x"][:, 0] * 0 + torch.get_num_threads(), processes=cores) as client:
        assert answer(client).tolist() == [1.0] * 3


def test_one_process_computes_in_threads_after_a_load_that_did(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # Spark itself sets 1

    def load():
        module = torch.nn.Linear(1024, 1024)
        module.load_state_dict(module.state_dict())
        module(torch.ones(512, 1024))
        return lambda batch: module(torch.ones(512, 1024))[:3, 0] * 0 + torch.get_num_threads()

    with served(load, processes=1) as client:
        assert answer(client).tolist() == [2.0] * 3


def test_processes_of_a_model_draw_different_numbers():
    def load():
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        return lambda batch: [[float(torch.rand(1)), np.random.rand(), random.random()]] * 3

    drawn = []
    with served(load, processes=2) as client:

        def requests():
            yield "first", ScoreRequest({"x": np.ones((3, 2), "float32")}, 3, ("y",), 3, False)
            drawn.append(answer(ModelClient(client._order))[0])  # of the other process

        drawn += [found.outputs[0][0] for _, found in client.answers(requests())]
    assert not set(drawn[0]) & set(drawn[1])


@pytest.mark.slow
def test_rows_that_end_the_process_are_no_error_of_other_tasks():
    def load():
        def score(batch):
            if (batch["x"] == 3).any():
                os._exit(3)
            return batch["x"][:, 0]

        return score

    with served(load, processes=1) as client:

        def requests():
            rows = ScoreRequest({"x": np.ones((3, 2), "float32")}, 3, ("y",), 3, False)
            yield "first", rows
            with pytest.raises(ModelError, match="computed 3 rows ended with exit status 3"):
                answer(ModelClient(client._order), 3.0)
            yield "second", rows

        assert [found.outputs[0].tolist() for _, found in client.answers(requests())] == [[1.0] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "words"), [(1, "the model has not been forked within 2 s"), (2, "has not computed a batch within 2 s")]
)
def test_a_fork_that_hangs_is_an_error(depth, words):
    def load():
        forks = []

        def child():
            forks.append(0)
            while len(forks) == depth:
                threading.Event().wait()

        os.register_at_fork(after_in_child=child)
        return lambda batch: batch["x"]

    with served(load, processes=1, timeout=2) as client, pytest.raises(ModelError, match=words):
        answer(client)


def test_a_loader_that_has_ended_is_no_fork_that_failed(tmp_path):
    """The task hears how the loader has ended, and of nothing else before."""
    server = _Server(str(tmp_path), os.getpid(), 1, 60.0, 60.0)
    control, task = socket.socketpair()
    line, loader = socket.socketpair()
    with control, task, line, server._listener:
        loader.close()
        server._listen()
        server._loader, server._is_loaded = _Worker(line, 1), True
        server._clients[1] = _Client(control)
        server._connect(1)
        assert server._workers == [None]
        assert len(server._selector.get_map()) == 0
        server._lose_loader(3)
        assert task.recv(1) == ENDED
        text = "the model has ended: its loader ended its process with exit status 3"
        assert receive(task, ProcessEnded).text == text
    os.close(server._owner)


SURVIVED = ProcessEnded("", was_computing=False)


@pytest.mark.parametrize(
    ("code", "task", "culprit", "told"),
    [
        pytest.param(3, 1, 1, ProcessEnded("ended with exit status 3", is_final=True), id="exits"),
        pytest.param(3, 2, 1, SURVIVED, id="exits-for-another"),
        pytest.param(3, 1, SEVERAL, SURVIVED, id="exits-for-one-of-several"),
        pytest.param(3, 1, 0, ProcessEnded("ended with exit status 3", is_final=True), id="exits-for-nobody"),
        pytest.param(-11, 1, 1, ProcessEnded("was killed by SIGSEGV"), id="killed"),
        pytest.param(-11, 2, 1, SURVIVED, id="killed-for-another"),
        pytest.param(-11, 1, 0, SURVIVED, id="killed-for-nobody"),
    ],
)
def test_what_a_task_is_told(tmp_path, code, task, culprit, told):
    server = _Server(str(tmp_path), os.getpid(), 1, 60.0, 60.0)
    assert server._end_of(7, code, task, culprit) == told
    assert server._end_of(0, -9, task, 0) == ProcessEnded("could not be forked"), "else the task would wait for ever"
    os.close(server._owner)
