"""The process that computes."""

import mmap
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distributor.scoring import wire
from distributor.scoring.model_process import _Worker
from distributor.scoring.model_server import SLOT


@contextmanager
def working(score: Any, slot: Any = None) -> Iterator[Any]:
    """What connects a task by its number to a process that computes."""
    line, server = socket.socketpair()
    run = _Worker(line, mmap.mmap(-1, SLOT.size) if slot is None else slot, 0, score).run
    worker = threading.Thread(target=run, daemon=True)  # also if the test fails
    worker.start()
    tasks = []

    def connect(number: int) -> socket.socket:
        task, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(server, [struct.pack("!Q", number)], [theirs.fileno()])
        tasks.append(task)
        return task

    with line, server:
        yield connect
        server.shutdown(socket.SHUT_WR)
        worker.join()
    for task in tasks:
        task.close()


def test_a_task_that_does_not_read_holds_up_no_other() -> None:
    answer = np.zeros((10, 1 << 17), "float32")  # the model uses its memory again

    def score(batch: Any) -> Any:
        answer[:] = batch["x"][0].item()
        return answer

    def send(task: socket.socket, value: float) -> None:
        wire.send(task, wire.ScoreRequest({"x": np.full(10, value, "float32")}, 10, ("y",), 10, False))

    def received(task: socket.socket) -> tuple[tuple[int, ...], set[float]]:
        (values,) = wire.receive(task, wire.ScoreAnswer).outputs
        return values.shape, set(values.ravel().tolist())

    with working(score) as connect:
        first, second, third = map(connect, (1, 2, 3))
        for round_ in range(3):
            send(first, round_)
            send(second, 10 + round_)
            assert received(second) == (answer.shape, {10 + round_}), "before the first one reads"
            assert received(first) == (answer.shape, {round_})
        send(third, 1)
        third.close()
        send(second, 2)
        assert received(second) == (answer.shape, {2})


def test_rows_of_several_tasks_that_wait_are_one_batch():
    sizes, begun, go = [], threading.Event(), threading.Event()

    def score(batch):
        sizes.append(len(batch["x"]))
        if sizes[3:] == [1]:
            begun.set()
            go.wait()
        return batch["x"] + 1

    def send(number):
        wire.send(tasks[number], wire.ScoreRequest({"x": np.full(number, number)}, number, ("y",), 10, False))

    def receive(number):
        return wire.receive(tasks[number], wire.ScoreAnswer).outputs[0].tolist() == [number + 1] * number

    tasks = {}
    with working(score) as connect:
        for number in (1, 2, 3):
            tasks[number] = connect(number)
            send(number)
            assert receive(number)
        send(1)
        begun.wait()
        send(2)
        send(3)
        go.set()
        assert [receive(number) for number in tasks] == [True] * 3
    assert sizes == [1, 2, 3, 1, 5], "those that came while it computed"


def test_a_batch_takes_until_its_values_are_read():
    """A GPU computes meanwhile, and may hang."""
    begins, slot = [], mmap.mmap(-1, SLOT.size)

    class Late(torch.Tensor):
        def to(self, *args):
            begins.append(SLOT.unpack_from(slot)[0])
            return super().to(*args)

    with working(lambda batch: batch["x"].as_subclass(Late), slot) as connect:
        task = connect(1)
        wire.send(task, wire.ScoreRequest({"x": np.ones(3)}, 3, ("y",), 10, False))
        wire.receive(task, wire.ScoreAnswer)
        wire.send(task, wire.ScoreRequest({"x": np.ones(0)}, 0, ("y",), 10, False))
        wire.receive(task, wire.ScoreAnswer)
        assert SLOT.unpack_from(slot)[0] == 0
    assert begins[0] > 0


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def test_inputs_that_cannot_be_read_are_an_error_of_their_task():
    with working(lambda batch: batch["x"]) as connect:
        first, second = connect(1), connect(2)
        wire.send(first, wire.ScoreRequest({"x": [Unreadable()]}, 1, ("y",), 10, False))
        answer = wire.receive(first, wire.ScoreAnswer)
        assert answer.error.startswith("the inputs cannot be read: ValueError: invalid literal for int()")
        wire.send(second, wire.ScoreRequest({"x": np.ones(1)}, 1, ("y",), 10, False))
        assert wire.receive(second, wire.ScoreAnswer).outputs[0].tolist() == [1]
