"""Runs in the processes with the user's code: one loads the model, and forks those that compute with it.

Forks share the pages of the model. Each takes connections of Spark tasks from the server, and answers their requests in
turn.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import selectors
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from distributor.machine import processes
from distributor.scoring import wire
from distributor.scoring.halving import described
from distributor.scoring.model import Score, answer, scoring
from distributor.scoring.model_server import SLOT, show_stack
from distributor.shipping import pickling


def load(folder: str, line: socket.socket, server: int, slots: mmap.mmap, count: int) -> None:
    """Load the model, say so, and fork a process for each connection that comes along the line."""
    if count > 1:
        torch.set_num_threads(1)  # before the forks: threads of OpenMP do not survive them
    paths = json.loads(Path(folder, wire.PATHS).read_text())
    sys.path[1:1] = [each for each in paths if each not in sys.path]
    SLOT.pack_into(slots, SLOT.size * count, time.monotonic(), 0)
    try:
        function, args, kwargs = pickling.load_function(Path(folder, wire.CALL))
        score = scoring(function(*args, **kwargs))
    except BaseException as error:
        wire.send(line, wire.Loaded(described(error)))
        return
    gc.collect()
    gc.freeze()  # keeps pages shared: the collector does not write to them
    wire.send(line, wire.Loaded())
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, 8, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as own:
            between = os.fork()
            if not between:
                line.close()
                place: int = struct.unpack("!Q", data)[0]
                _fork_to_server(folder, own, server, _Worker(own, slots, place, score))
            os.waitpid(between, 0)


def _fork_to_server(folder: str, line: socket.socket, server: int, worker: _Worker) -> None:
    """Fork a process, and end, so that it becomes the server's child."""
    try:
        if pid := os.fork():
            wire.send(line, wire.Born(pid))
            return
        processes.wait_gone([parent] if (parent := os.getppid()) != server else [], 60.0)
        processes.die_with_parent(server)
        show_stack(folder)
        worker.run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class _Worker:
    def __init__(self, line: socket.socket, slots: mmap.mmap, place: int, score: Score) -> None:
        self._line = line
        self._slots = slots
        self._at = SLOT.size * place
        self._score = score
        self._task = 0  # whose rows are computed

    def run(self) -> None:
        """Answer the requests of connections until the server has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._line, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    connection: Any = key.fileobj
                    if connection is self._line:
                        data, descriptors, _, _ = socket.recv_fds(self._line, 8, 1)
                        if not data:
                            return
                        new = socket.socket(fileno=descriptors[0])
                        selector.register(new, selectors.EVENT_READ, *struct.unpack("!Q", data))
                        continue
                    self._task = key.data
                    self._note(0.0)
                    try:
                        self._serve(connection)
                    except (EOFError, OSError):  # the task has ended
                        selector.unregister(connection)
                        connection.close()
                    self._task = 0
                    self._note(0.0)

    def _serve(self, connection: socket.socket) -> None:
        request = wire.receive(connection, wire.ScoreRequest)
        try:
            wire.send(connection, answer(self._timed, request))
        except OSError:
            raise
        except Exception as error:  # outputs that NumPy or pickle cannot take
            problem = f"the model's outputs cannot be sent: {described(error)}"
            wire.send(connection, wire.ScoreAnswer(error=problem))

    def _timed(self, batch: dict[str, Any]) -> Any:
        self._note(time.monotonic())
        try:
            return self._score(batch)
        finally:
            self._note(0.0)

    def _note(self, began: float) -> None:
        SLOT.pack_into(self._slots, self._at, began, self._task)
