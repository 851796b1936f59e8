"""The process that computes."""

import mmap
import socket
import struct
import threading

import numpy as np

from distributor.scoring import wire
from distributor.scoring.model_process import _Worker
from distributor.scoring.model_server import SLOT


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

    line, server = socket.socketpair()
    run = _Worker(line, mmap.mmap(-1, SLOT.size), 0, score).run
    worker = threading.Thread(target=run, daemon=True)  # also if this test fails
    worker.start()
    tasks = {}
    with line, server:
        for number in (1, 2, 3):
            tasks[number], theirs = socket.socketpair()
            with theirs:
                socket.send_fds(server, [struct.pack("!Q", number)], [theirs.fileno()])
            send(number)
            assert receive(number)
        send(1)
        begun.wait()
        send(2)
        send(3)
        go.set()
        assert [receive(number) for number in tasks] == [True] * 3
        server.shutdown(socket.SHUT_WR)
        worker.join()
    for task in tasks.values():
        task.close()
    assert sizes == [1, 2, 3, 1, 5], "those that came while it computed"
