"""Runs in a process of its own beside an executor: loads a model once, and forks processes that compute with it.

Forks share the pages of the model. Each takes connections of Spark tasks from one socket, and answers their requests in
turn. The process ends with its executor, or once no task has asked for a while.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import selectors
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from distributor.machine import folders, processes

_MOMENT = 0.005  # seconds for which a process with connections leaves new ones to others, for each connection
_TURN = 1.0  # seconds between two looks at the clock


def main(folder: str, owner_pid: str, count: str, keep: str) -> None:
    """Load the model, say so on standard output, and serve (entry point)."""
    starter = open(os.dup(1), "w")  # the task that has started this process waits for one line
    os.dup2(2, 1)  # what the loader prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with folders.claim(folder):  # others remove it if this process is killed
            owner = processes.pidfd_open(int(owner_pid))
            listener = socket.socket(socket.AF_UNIX)
            _Server(folder, owner, listener, int(count), float(keep), starter).run()
    finally:
        folders.remove(folder)


class _Server:
    def __init__(
        self, folder: str, owner: int, listener: socket.socket, count: int, keep: float, starter: TextIO
    ) -> None:
        self._folder = folder
        self._owner = owner
        self._listener = listener
        self._count = count
        self._keep = keep
        self._starter = starter
        self._used = mmap.mmap(-1, 8 * count)  # when each process was last used; infinity while it is
        self._pids: dict[int, int] = {}  # place by pidfd

    def run(self) -> None:
        if not self._load():
            return
        gc.collect()
        gc.freeze()  # keeps pages shared: the collector does not write to them
        for place in range(self._count):
            self._fork(place)
        self._say("")
        folders.remove_stale()
        while not self._is_idle():
            ended = processes.readable([self._owner, *self._pids], _TURN)
            if self._owner in ended:
                return
            for descriptor in ended:
                os.close(descriptor)
                self._fork(self._pids.pop(descriptor))
            processes.reap(keep=())

    def _say(self, text: str) -> None:
        with suppress(BrokenPipeError), self._starter:
            self._starter.write(json.dumps(text) + "\n")

    def _load(self) -> bool:
        import torch

        from distributor.scoring.model import described, scoring
        from distributor.shipping import pickling

        if self._count > 1:
            torch.set_num_threads(1)  # before the forks: threads of OpenMP do not survive them
        try:
            function, args, kwargs = pickling.load_function(Path(self._folder, "call"))
            self._score = scoring(function(*args, **kwargs))
        except BaseException as error:
            self._say(described(error))
            return False
        path = f"/proc/self/fd/{os.open(self._folder, os.O_DIRECTORY)}"  # a socket's path has at most 107 bytes
        self._listener.bind(f"{path}/new")
        self._listener.listen(128)
        self._listener.setblocking(False)
        os.rename(f"{path}/new", f"{path}/socket")
        return True

    def _is_idle(self) -> bool:
        if not os.path.exists(self._folder):
            return True
        return time.monotonic() - max(self._used_at(place) for place in range(self._count)) > self._keep

    def _used_at(self, place: int) -> float:
        return float(struct.unpack_from("d", self._used, 8 * place)[0])

    def _fork(self, place: int) -> None:
        self._use(place, time.monotonic())
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                processes.die_with_parent(parent)
                self._compute(place)
            finally:
                os._exit(1)
        self._pids[processes.pidfd_open(pid)] = place

    def _use(self, place: int, moment: float) -> None:
        struct.pack_into("d", self._used, 8 * place, moment)

    def _compute(self, place: int) -> None:
        """Answer the requests of connections until this process is killed."""
        from distributor.scoring import wire
        from distributor.scoring.model import answer, described

        connections: set[socket.socket] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                self._use(place, math.inf if connections else time.monotonic())
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        time.sleep(_MOMENT * len(connections))
                        with suppress(BlockingIOError):
                            connection, _ = self._listener.accept()
                            connection.setblocking(True)
                            connections.add(connection)
                            selector.register(connection, selectors.EVENT_READ)
                        continue
                    connection = key.fileobj  # type: ignore[assignment]
                    try:
                        request = wire.receive(connection, wire.ScoreRequest)
                        try:
                            wire.send(connection, answer(self._score, request))
                        except OSError:
                            raise
                        except Exception as error:  # outputs that NumPy or pickle cannot take
                            problem = f"the model's outputs cannot be sent: {described(error)}"
                            wire.send(connection, wire.ScoreAnswer(error=problem))
                    except (EOFError, OSError):  # the task has ended
                        selector.unregister(connection)
                        connections.discard(connection)
                        connection.close()
