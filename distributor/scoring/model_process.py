"""Runs in the processes with the user's code: one loads the model, and forks those that compute with it.

Forks share the pages of the model. Each takes connections of Spark tasks from the server, and answers their requests in
turn. On a GPU, the process that has loaded the model does so itself: CUDA does not survive a fork.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distributor.machine import processes
from distributor.scoring import wire
from distributor.scoring.halving import described
from distributor.scoring.model import Score, answers, scoring, together, unsent
from distributor.scoring.model_server import SEVERAL, SLOT, show_stack
from distributor.scoring.row_memory import RowMemory
from distributor.shipping import pickling


def load(folder: str, line: socket.socket, server: int, slots: mmap.mmap, count: int, *, on_gpu: bool) -> None:
    """Load the model, say so, and fork a process for each connection that comes along the line; on a GPU, serve."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # one for each level
    threads = int(asked) if asked.isdecimal() else max(1, processes.cpu_count() // count)
    if not on_gpu:
        torch.set_num_threads(1)  # before the forks: threads of OpenMP do not survive them
    out: Any = sys.stdout
    out.reconfigure(line_buffering=True)  # else what was printed is lost with the process
    paths = json.loads(Path(folder, wire.PATHS).read_text())
    sys.path[1:1] = [each for each in paths if each not in sys.path]
    own_slot = SLOT.size * count
    SLOT.pack_into(slots, own_slot, time.monotonic(), 0)
    try:
        function, args, kwargs = pickling.load_function(Path(folder, wire.CALL))
        score = scoring(function(*args, **kwargs), on_gpu=on_gpu)
    except BaseException as error:
        wire.send(line, wire.Loaded(described(error)))
        return
    SLOT.pack_into(slots, own_slot, 0.0, 0)
    gc.collect()
    gc.freeze()  # keeps pages shared: the collector does not write to them
    wire.send(line, wire.Loaded())
    if on_gpu:
        _Worker(line, slots, 0, score).run()
        return
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, 8, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as own:
            place: int = struct.unpack("!Q", data)[0]
            for at in (own_slot, SLOT.size * place):
                SLOT.pack_into(slots, at, time.monotonic(), 0)  # what the user's libraries do in forks may hang
            between = os.fork()
            if not between:
                line.close()
                torch.set_num_threads(threads)
                _fork_to_server(folder, own, server, _Worker(own, slots, place, score))
            os.waitpid(between, 0)
            SLOT.pack_into(slots, own_slot, 0.0, 0)


def _fork_to_server(folder: str, line: socket.socket, server: int, worker: _Worker) -> None:
    """Fork a process, and end, so that it becomes the server's child."""
    try:
        if pid := os.fork():
            wire.send(line, wire.Born(pid))
            return
        processes.wait_gone([parent] if (parent := os.getppid()) != server else [], 60.0)
        processes.die_with_parent(server)
        show_stack(folder)
        processes.reseed()
        worker.run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


@dataclass
class _Task:
    number: int
    connection: socket.socket
    memory: RowMemory = field(default_factory=RowMemory)
    outgoing: wire.Outgoing | None = None  # an answer, the end of which the connection has not taken yet


@dataclass(frozen=True)
class _Asked:
    task: _Task
    request: wire.ScoreRequest


class _Worker:
    def __init__(self, line: socket.socket, slots: mmap.mmap, place: int, score: Score) -> None:
        self._line = line
        self._slots = slots
        self._at = SLOT.size * place
        self._score = score
        self._task = 0  # whose rows are computed
        self._selector: selectors.BaseSelector

    def run(self) -> None:
        """Answer the requests of connections until the server has ended."""
        self._works_for(0)
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._line, selectors.EVENT_READ)
            while True:
                asked: list[_Asked] = []
                for key, _ in self._selector.select():
                    connection: Any = key.fileobj
                    if connection is self._line:
                        data, descriptors, _, _ = socket.recv_fds(self._line, 8, 1)
                        if not data:
                            return
                        (number,) = struct.unpack("!Q", data)
                        task = _Task(number, socket.socket(fileno=descriptors[0]))
                        self._selector.register(task.connection, selectors.EVENT_READ, task)
                    elif key.data.outgoing is not None:
                        self._send(key.data)
                    elif (request := self._receive(key.data)) is not None:
                        asked.append(_Asked(key.data, request))
                for places in together([each.request for each in asked]):
                    self._answer([asked[place] for place in places])

    def _receive(self, task: _Task) -> wire.ScoreRequest | None:
        request: wire.ScoreRequest | None = None
        self._works_for(task.number)
        try:
            request = wire.receive(task.connection, wire.ScoreRequest, task.memory)
        except (EOFError, ConnectionError):
            self._leave(task)
        except Exception as error:  # such as of a module that only the task has
            task.outgoing = wire.Outgoing(wire.ScoreAnswer(error=f"the inputs cannot be read: {described(error)}"))
            self._send(task)
        self._works_for(0)
        return request

    def _leave(self, task: _Task) -> None:
        """A task has ended."""
        self._selector.unregister(task.connection)
        task.connection.close()

    def _answer(self, asked: list[_Asked]) -> None:
        """Compute the rows of some requests together, and answer each."""
        self._works_for(asked[0].task.number if len(asked) == 1 else SEVERAL)
        for each, found in zip(asked, answers(self._timed, [each.request for each in asked])):
            try:
                each.task.outgoing = wire.Outgoing(found)
            except Exception as error:  # no pickle can hold them
                each.task.outgoing = wire.Outgoing(unsent(error))
            self._send(each.task)
        self._works_for(0)

    def _send(self, task: _Task) -> None:
        """Send what a task's connection takes, and await that it takes the rest; only then, the task sends again.

        Nobody waits here for a task: its rows may come from another prediction, which this process computes too.
        """
        assert task.outgoing is not None
        try:
            is_sent = task.outgoing.send(task.connection)
        except ConnectionError:
            self._leave(task)
            return
        if is_sent:
            task.outgoing = None
        awaited = selectors.EVENT_READ if is_sent else selectors.EVENT_WRITE
        if self._selector.get_key(task.connection).events != awaited:
            self._selector.modify(task.connection, awaited, task)

    def _timed(self, batch: dict[str, Any]) -> Any:
        self._note(time.monotonic())  # until the next batch or the answer: a GPU computes until its values are read
        return self._score(batch)

    def _works_for(self, task: int) -> None:
        self._task = task
        self._note(0.0)

    def _note(self, began: float) -> None:
        SLOT.pack_into(self._slots, self._at, began, self._task)
