"""A Spark task's end: finds or starts the executor's model, and sends rows until they are answered.

Standard library and NumPy only: it travels into Spark's workers by value.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from distributor.machine import bootstrap, devices, folders, model_servers, processes
from distributor.machine.shared_memory import memory_file
from distributor.schedulers.spark.executor import executor_of_this
from distributor.scoring import wire
from distributor.scoring.halving import described
from distributor.scoring.row_memory import RowMemory
from distributor.values.layout import OWNER

_MOST_LOST = 3  # processes of the model that may end while they compute the same rows
_MOST_TRIES = 20  # connections to servers that end or are killed at once
_FOREVER = -1.0  # seconds

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
        timeout: seconds for the load, and for each batch.
    """

    key: str
    package: bytes
    call: bytes
    processes: int
    keep: float
    timeout: float


class ModelClient:
    """One task's connection to the executor's model, or to the one on these GPUs."""

    def __init__(self, order: ModelOrder, gpus: Sequence[str] = (), task_cpus: int = 0) -> None:
        self._order = order
        self._gpus = gpus
        self._task_cpus = task_cpus
        self._owner = executor_of_this()
        who = [order.key, processes.start_time(self._owner), sys.executable, os.geteuid(), *gpus]
        digest = hashlib.sha256(json.dumps(who).encode()).hexdigest()[:16]
        self._folder = f"{model_servers.folder_prefix(self._owner)}{digest}"
        self._control: socket.socket | None = None  # to the server
        self._data: socket.socket | None = None  # to the process that computes
        self._memory = RowMemory()  # with it
        self._here: LocalModel | None = None  # where no server can be reached

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
        if self._here is not None:
            return
        if self._data is None:
            try:
                self._data, self._memory = self._reach(), RowMemory()
            except OSError as error:
                if self._gpus:  # each worker would load a copy into the GPU's memory
                    raise ModelError(f"no process can keep the model on GPU {','.join(self._gpus)}: {error}") from None
                self._here = load_here(self._order, error)
                return
        try:
            with suppress(ConnectionError):  # _receive() finds out why
                wire.send(self._data, request, self._memory)
        except OSError as error:
            raise ModelError(f"{request.rows} rows cannot be sent to the model: {error}") from None

    def _receive(self, request: wire.ScoreRequest) -> wire.ScoreAnswer:
        lost = 0
        while True:
            if self._here is not None:
                return self._here.answer(_alone(request))
            if (found := self._answer()) is not None:
                if not found.again:
                    return found
                self._send(_alone(request))
                continue
            ended = self._ended()
            if ended.is_final:
                raise ModelError(_sentence(f"a process of the model that computed {request.rows} rows", ended))
            lost += ended.was_computing
            if lost == _MOST_LOST:
                who = f"{lost} times, a process of the model that computed the same {request.rows} rows"
                raise ModelError(_sentence(who, ended))
            self._send(_alone(request))

    def _answer(self) -> wire.ScoreAnswer | None:
        """Wait for an answer; ``None``: the process that computes has ended, or the server."""
        assert self._control is not None and self._data is not None
        with suppress(EOFError, OSError):
            if self._data.fileno() in processes.readable([self._data.fileno(), self._control.fileno()], _FOREVER):
                return wire.receive(self._data, wire.ScoreAnswer)
        return None

    def _ended(self) -> wire.ProcessEnded:
        """Return how the process that computes has ended, once the server knows."""
        assert self._control is not None and self._data is not None
        self._data.close()
        self._data = None
        found = self._hear()
        if isinstance(found, wire.ProcessEnded):
            return found
        self._close()
        return wire.ProcessEnded("ended with its server")

    def _hear(self) -> socket.socket | wire.ProcessEnded | None:
        """Return what the server says next: a connection, or how a process has ended; ``None``: the server has."""
        assert self._control is not None
        with suppress(EOFError, OSError):
            data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
            if data == wire.CONNECTED:
                return socket.socket(fileno=descriptors[0])
            if data == wire.ENDED:
                return wire.receive(self._control, wire.ProcessEnded)
        return None

    def _reach(self) -> socket.socket:
        """Return a connection to a process that computes; start the server, which loads the model, if there is none."""
        lost: list[wire.ProcessEnded] = []
        for _ in range(_MOST_TRIES):
            found = self._hear() if self._control is not None else self._join()
            if isinstance(found, socket.socket):
                return found
            if found is None:
                self._close()
                continue
            lost += [found] if found.was_computing else []
            if found.is_final:
                raise ModelError(_sentence("", found))
            if len(lost) == _MOST_LOST:
                break
        ended = lost[-1] if lost else wire.ProcessEnded("ended with its server")
        raise ModelError(_sentence(f"{len(lost) or _MOST_TRIES} times, the process that loads the model", ended))

    def _join(self) -> socket.socket | wire.ProcessEnded | None:
        found = self._server()
        if isinstance(found, wire.ProcessEnded):
            return found
        self._control = found
        return self._hear()

    def _server(self) -> socket.socket | wire.ProcessEnded:
        """Connect to the server of this executor; start it if there is none. Or return how it has ended meanwhile.

        Whoever starts it keeps the lock, and the server itself until it listens: so there is never another one.
        """
        process: subprocess.Popen[bytes] | None = None
        while True:
            folders.make_private(self._folder)
            with suppress(FileNotFoundError), open(path := os.path.join(self._folder, model_servers.LOCK), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                    continue  # of a server that has ended, and has left the name to another
                with suppress(FileNotFoundError, ConnectionRefusedError):
                    limits = struct.pack(wire.LIMITS, self._order.timeout, self._order.keep)
                    return model_servers.connect(self._folder, wire.SCORE + limits)
                if process is not None:
                    break
                process = self._start(lock)
        return wire.ProcessEnded(wire.how_ended(process.wait()), log=wire.end_of_log(self._folder))

    def _start(self, lock: IO[str]) -> subprocess.Popen[bytes]:
        owner = os.path.join(self._folder, OWNER)
        with suppress(FileNotFoundError):
            os.unlink(owner)  # others would remove the folder of an owner that has ended
        os.link(lock.name, owner)  # until the server has one of its own, who has the lock owns the folder
        order, package = self._order, os.path.join(self._folder, wire.PACKAGE)
        paths = json.dumps([each for each in sys.path if each and isinstance(each, str)]).encode()  # also of addPyFile
        files = {wire.PACKAGE: order.package, wire.CALL: order.call, wire.PATHS: paths}
        if self._gpus:
            files[model_servers.GPUS] = "\n".join(self._gpus).encode()
        for name, content in files.items():
            with open(os.path.join(self._folder, name), "wb") as file:
                file.write(content)
        count = 0 if self._gpus else order.processes or processes.cpu_count()
        arguments = [self._folder, self._owner, count, order.keep, order.timeout]
        environ = {**os.environ, **devices.rank_visibility(self._gpus, bool(self._gpus))}
        if not self._gpus and environ.get("OMP_NUM_THREADS") == str(self._task_cpus):  # by Spark, for the task
            del environ["OMP_NUM_THREADS"]
        for other in model_servers.on_gpus(self._gpus, self._owner):
            model_servers.release(other)  # its memory may be needed
        command = bootstrap.command(package, "starter", *map(str, arguments))
        with open(os.path.join(self._folder, wire.LOG), "wb") as log:
            try:
                return subprocess.Popen(
                    command, stdin=lock, stdout=log, stderr=log, env=environ, start_new_session=True
                )
            except FileNotFoundError:  # not of the folder, which may be made anew
                raise OSError(f"{sys.executable!r} is no longer there") from None

    def _close(self) -> None:
        for each in (self._data, self._control):
            if each is not None:
                each.close()
        self._data = self._control = None


def _alone(request: wire.ScoreRequest) -> wire.ScoreRequest:
    """Return a request that is computed by itself: which task's rows end the process, or fail, is known then."""
    return wire.ScoreRequest(**{**vars(request), "is_alone": True})  # not replace(), see wire.send()


class LocalModel:
    """A model in this worker."""

    def __init__(self, order: ModelOrder) -> None:
        self._files = [_in_memory(each) for each in (order.package, order.call)]
        package, call = (f"/proc/self/fd/{each}" for each in self._files)
        sys.path.insert(0, package)
        try:
            model = importlib.import_module("distributor.scoring.model")
            function, args, kwargs = importlib.import_module("distributor.shipping.pickling").load_function(call)
            self._score = model.scoring(function(*args, **kwargs))
            self._answer = model.answer
        except (Exception, SystemExit) as error:
            raise ModelError(f"the model cannot be loaded: {described(error)}") from None
        finally:
            sys.path.remove(package)

    def answer(self, request: wire.ScoreRequest) -> wire.ScoreAnswer:
        """Compute outputs as a process of the model does."""
        found: wire.ScoreAnswer = self._answer(self._score, request)
        return found


def load_here(order: ModelOrder, why: OSError) -> LocalModel:
    """Load a model into this worker, which keeps it while it lives, and warn once."""
    kept: Any = sys.modules.setdefault("_distributor_models", types.ModuleType("_distributor_models"))
    found: LocalModel | None = getattr(kept, order.key, None)
    if found is None:
        logging.getLogger("distributor").warning(
            "no process can keep the model for all tasks of this executor (%s): this worker loads it for itself", why
        )
        found = LocalModel(order)
        setattr(kept, order.key, found)
    return found


def _in_memory(content: bytes) -> int:
    descriptor = memory_file("distributor")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor


def release() -> int:
    """End the models of this task's executor that no other task uses; return how many."""
    begin = model_servers.folder_prefix(executor_of_this())
    return sum(map(model_servers.release, glob.glob(f"{glob.escape(begin)}*")))


def _sentence(who: str, ended: wire.ProcessEnded) -> str:
    text = f"{who} {ended.text}" if who and not ended.is_whole else ended.text
    return f"{text}. It has written:\n{ended.log}" if ended.log else text
