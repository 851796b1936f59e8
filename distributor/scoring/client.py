"""A Spark task's end: finds or starts the executor's model, and sends rows until they are answered.

Standard library only: it travels into Spark's workers by value.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from distributor.machine import bootstrap, folders, processes
from distributor.schedulers.spark.executor import executor_of_this
from distributor.scoring import wire
from distributor.values.layout import OWNER, PREFIX

_MOST_LOST = 3  # processes of the model that may end while they compute the same rows
_LOG = 2000  # characters of what the model has written that an error quotes

T = TypeVar("T")


class ModelError(Exception):
    """The model cannot be loaded, or fails."""


@dataclass(frozen=True)
class ModelOrder:
    """What a model is loaded from, and how it is kept.

    Attributes:
        key: the same for the same model.
        package: this package, as a zip.
        call: the pickled call that loads the model.
        processes: how many compute; 0 for as many as this executor may use CPUs.
        keep: seconds for which an unused model is kept.
    """

    key: str
    package: bytes
    call: bytes
    processes: int
    keep: float


class ModelClient:
    """One task's connection to the executor's model."""

    def __init__(self, order: ModelOrder) -> None:
        self._order = order
        owner = executor_of_this()
        who = [order.key, owner, processes.start_time(owner), sys.executable, os.geteuid()]
        digest = hashlib.sha256(json.dumps(who).encode()).hexdigest()[:16]
        self._owner = owner
        self._folder = os.path.join(tempfile.gettempdir(), f"{PREFIX}model-{digest}")
        self._connection: socket.socket | None = None

    def answers(self, requests: Iterable[tuple[T, wire.ScoreRequest]]) -> Iterator[tuple[T, wire.ScoreAnswer]]:
        """Yield what comes with each request, and its answer, in order. ModelError: the model cannot answer.

        The next request is made while the model computes.
        """
        sent: tuple[T, wire.ScoreRequest] | None = None
        try:
            for each in requests:
                answer = None if sent is None else self._receive(sent[1])
                self._send(each[1])
                if sent is not None and answer is not None:
                    yield sent[0], answer
                sent = each
            if sent is not None:
                yield sent[0], self._receive(sent[1])
        finally:
            self._close()

    def _send(self, request: wire.ScoreRequest) -> None:
        try:
            if self._connection is None:
                self._connection = self._reach()
            wire.send(self._connection, request)
        except OSError:
            self._close()  # _receive() sends it again

    def _receive(self, request: wire.ScoreRequest) -> wire.ScoreAnswer:
        for _ in range(_MOST_LOST):
            if self._connection is None:
                self._send(request)
            try:
                if self._connection is not None:
                    return wire.receive(self._connection, wire.ScoreAnswer)
            except (EOFError, OSError):
                self._close()
        raise ModelError(
            f"the processes of the model ended {_MOST_LOST} times while they computed {request.rows} rows, maybe "
            f"because the machine has too little memory{self._log()}"
        )

    def _reach(self) -> socket.socket:
        """Connect to the model of this executor; start it if it is not there."""
        lost = ""
        for _ in range(_MOST_LOST):
            folders.make_private(self._folder)
            with suppress(FileNotFoundError), folders.locked(os.path.join(self._folder, "lock")):
                with suppress(FileNotFoundError, ConnectionRefusedError):
                    return self._connect()
                lost = self._start()
                with suppress(FileNotFoundError, ConnectionRefusedError):
                    return self._connect()
        raise ModelError(f"the model's process ended {_MOST_LOST} times while it loaded the model{lost}")

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        descriptor = os.open(self._folder, os.O_DIRECTORY)
        try:
            connection.connect(f"/proc/self/fd/{descriptor}/socket")  # a socket's path has at most 107 bytes
            listener, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if processes.start_time(listener) is None:  # killed: its forks still listen, and are about to end
                raise ConnectionRefusedError
            return connection
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(descriptor)

    def _start(self) -> str:
        """Start the model and wait until it is loaded. Return how the process has ended, if it has."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, OWNER))  # others would remove the folder of an owner that has ended
        order, package = self._order, os.path.join(self._folder, "package.zip")
        for name, content in ((package, order.package), (os.path.join(self._folder, "call"), order.call)):
            with open(name, "wb") as file:
                file.write(content)
        count = order.processes or processes.cpu_count()
        arguments = [self._folder, str(self._owner), str(count), str(order.keep)]
        with open(os.path.join(self._folder, "log"), "wb") as log:
            process = subprocess.Popen(
                bootstrap.command(package, "model", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdout is not None
        with process.stdout as output:
            line = output.readline()
        if not line:
            code = process.wait()
            how = f": {processes.signal_name(-code) if code < 0 else f'exit status {code}'}{self._log()}"
            folders.remove(self._folder)
            return how
        if problem := json.loads(line):
            process.wait()
            raise ModelError(f"the model cannot be loaded: {problem}")
        return ""

    def _log(self) -> str:
        with suppress(OSError), open(os.path.join(self._folder, "log"), errors="replace") as file:
            if lines := file.read()[-_LOG:].strip():
                return f". It has written:\n{lines}"
        return ""

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
