"""Runs in a process of its own beside an executor, without code of users: keeps a model for the executor's tasks.

Its child, the loader, loads the model once and forks processes that compute, which become this process's children too;
on a GPU, it computes itself.
Each task has a connection to this process, and gets one to a process that computes. It is told here how that process
has ended, if it ends, and gets another one. The server ends with its executor, or once no task has used it for a while.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import selectors
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from distributor.machine import folders, limits, model_servers, processes
from distributor.outcomes import stacks
from distributor.scoring import wire
from distributor.text.wording import mebibytes
from distributor.values.layout import MAIN_STACK_SIGNAL

_TURN = 1.0  # seconds between two looks at the clock, and for a process to write its stack
_MOST_KILLS = 10  # times that processes may have forked meanwhile
#: When a process began its batch, 0 between two; and for which task, 0 if for none.
SLOT = struct.Struct("dQ")
SEVERAL = (1 << 64) - 1  # in place of a task

_open: list[IO[bytes]] = []  # files that faulthandler uses


def serve(inherited: Mapping[str, int], _client: int, _notes: list[str], *arguments: str) -> None:
    """Serve, in a fork of a warm process."""
    os.dup2(inherited["lock"], 0)
    os.close(inherited["lock"])
    main(*arguments)


def main(folder: str, owner_pid: str, count: str, keep: str, timeout: str) -> None:
    """Serve (entry point), with ``count`` forks of the loader that compute; 0: the loader does itself.

    Standard input is the folder's lock, which is held until the server listens.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()
    with folders.claim(folder):  # others remove it if this process is killed
        server = _Server(folder, int(owner_pid), int(count), float(keep), float(timeout))
        signal.signal(signal.SIGTERM, lambda *_: server.stop())  # a second one interrupts no end()
        try:
            server.run()
        finally:
            server.end()


@dataclass
class _Client:
    """A task."""

    control: socket.socket
    timeout: float = 0.0  # seconds
    place: int | None = None  # of the process that computes for it


@dataclass
class _Worker:
    """A process that computes."""

    line: socket.socket
    pid: int = 0  # until it is known


class _Server:
    def __init__(self, folder: str, owner: int, count: int, keep: float, timeout: float) -> None:
        self._folder = folder
        self._owner = processes.pidfd_open(owner)
        self._keep = keep
        self._first_timeout = timeout
        self._forks = count > 0
        self._workers: list[_Worker | None] = [None] * max(count, 1)
        self._slots = mmap.mmap(-1, SLOT.size * (len(self._workers) + 1))  # the last is the loader's
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._loader: _Worker
        self._is_loaded = False
        self._is_over = False
        self._last_word: wire.ProcessEnded | None = None  # why there is no model, for the first task that comes
        self._clients: dict[int, _Client] = {}
        self._awaited: list[socket.socket] = []  # which want the end, and see it when this process closes them
        self._number = 0
        self._unclaimed: dict[int, int] = {}  # codes of children that have ended before their pids were known
        self._asked: dict[int, tuple[float, float]] = {}  # by pid: the batch, and when its stack was asked for
        self._stuck: dict[int, str] = {}  # by pid: where it was when it was killed
        self._used = 0.0
        self._ooms = processes.oom_kills()

    def run(self) -> None:
        waker, wake = os.pipe()
        for end in (waker, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._listen()
        self._start_loader()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        folders.remove_stale()
        self._watch(self._owner, self.stop)
        self._watch(waker, lambda: self._reap(waker))
        self._watch(self._listener, self._accept)
        while not self._is_over:
            for key in ready(self._selector):
                key.data()
            self._look_at_the_clock()

    def end(self) -> None:
        """Leave the folder's name to a successor, and end all processes."""
        with suppress(FileNotFoundError), folders.locked(os.path.join(self._folder, model_servers.LOCK)):
            ended = f"{self._folder}-{os.getpid()}"
            os.rename(self._folder, ended)
            self._folder = ended
        for _ in range(_MOST_KILLS):
            for pid in (left := processes.descendants(os.getpid())):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            processes.wait_gone(left, _TURN)
            if not left:
                break
        folders.remove(self._folder)

    def _watch(self, source: int | socket.socket, act: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def stop(self) -> None:
        self._is_over = True

    def _listen(self) -> None:
        path = f"/proc/self/fd/{os.open(self._folder, os.O_DIRECTORY)}"  # a socket's path has at most 107 bytes
        self._listener.bind(f"{path}/new")
        self._listener.listen(128)
        self._listener.setblocking(False)
        os.rename(f"{path}/new", f"{path}/{model_servers.SOCKET}")

    def _start_loader(self) -> None:
        ours, theirs = socket.socketpair()
        server = os.getpid()
        pid = os.fork()
        if not pid:
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                ours.close()
                self._listener.close()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                processes.die_with_parent(server)
                show_stack(self._folder)
                from distributor.scoring.model_process import load

                load(self._folder, theirs, server, self._slots, len(self._workers), on_gpu=not self._forks)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self._loader = _Worker(ours, pid)
        self._watch(ours, self._hear_loader)

    def _hear_loader(self) -> None:
        try:
            loaded = wire.receive(self._loader.line, wire.Loaded)
        except (EOFError, OSError):
            self._selector.unregister(self._loader.line)  # _reap() says more
            return
        self._used = time.monotonic()
        if loaded.error:
            self._tell_all(
                wire.ProcessEnded(f"the model cannot be loaded: {loaded.error}", is_final=True, is_whole=True)
            )
            return
        self._is_loaded = True
        if not self._forks:
            self._workers[0] = self._loader
        for number in list(self._clients):
            self._connect(number)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            control, _ = self._listener.accept()
            self._watch(control, lambda: self._welcome(control))

    def _welcome(self, control: socket.socket) -> None:
        self._selector.unregister(control)
        wish = b""
        with suppress(OSError):
            wish = control.recv(1 + struct.calcsize(wire.LIMITS))
        releases = wish == model_servers.RELEASE and not self._clients
        if releases:
            with suppress(OSError):
                control.sendall(model_servers.RELEASED)
        if releases or wish == model_servers.VACATE:
            self._awaited.append(control)
            self._end_if_awaited()
            return
        if not wish.startswith(wire.SCORE):
            control.close()
            return
        self._number += 1
        number = self._number
        timeout, self._keep = struct.unpack(wire.LIMITS, wish[1:])
        self._clients[number] = _Client(control, timeout)
        self._watch(control, lambda: self._leave(number))
        if self._last_word is not None:
            self._tell_all(self._last_word)
        elif self._is_loaded:
            self._connect(number)

    def _leave(self, number: int) -> None:
        """A task has ended: it says nothing else."""
        client = self._clients.pop(number)
        self._selector.unregister(client.control)
        client.control.close()
        self._used = time.monotonic()
        self._end_if_awaited()

    def _end_if_awaited(self) -> None:
        self._is_over = self._is_over or bool(self._awaited and not self._clients)

    def _connect(self, number: int) -> None:
        """Connect a task to the process that computes for the fewest others."""
        places = [client.place for client in self._clients.values()]
        place = min(range(len(self._workers)), key=lambda each: (places.count(each), self._workers[each] is None))
        worker = self._workers[place] or self._fork(place)
        if worker is None:
            return
        client = self._clients[number]
        client.place = place
        ours, theirs = socket.socketpair()
        with ours, theirs, suppress(OSError):  # _reap() and _leave() say more
            socket.send_fds(worker.line, [struct.pack("!Q", number)], [theirs.fileno()])
            socket.send_fds(client.control, [wire.CONNECTED], [ours.fileno()])

    def _fork(self, place: int) -> _Worker | None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._loader.line, [struct.pack("!Q", place)], [theirs.fileno()])
            except OSError:  # the loader has ended: _reap() says more
                ours.close()
                return None
        worker = self._workers[place] = _Worker(ours)
        self._watch(ours, lambda: self._hear_worker(place, worker))
        return worker

    def _hear_worker(self, place: int, worker: _Worker) -> None:
        try:
            worker.pid = wire.receive(worker.line, wire.Born).pid
        except (EOFError, OSError):
            self._selector.unregister(worker.line)  # _reap() says more
            if not worker.pid:  # unless it cannot know
                self._lose(place, -signal.SIGKILL)
            return
        if (code := self._unclaimed.pop(worker.pid, None)) is not None:
            self._lose(place, code)

    def _reap(self, waker: int) -> None:
        with suppress(BlockingIOError):
            os.read(waker, 4096)
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = found[0], os.waitstatus_to_exitcode(found[1])
                places = [place for place, each in enumerate(self._workers) if each is not None and each.pid == pid]
                if places:
                    self._lose(places[0], code)
                elif pid == self._loader.pid:
                    self._lose_loader(code)
                elif any(each is not None and not each.pid for each in self._workers):
                    self._unclaimed[pid] = code

    def _lose_loader(self, code: int) -> None:
        if where := self._stuck.get(self._loader.pid):
            text = (
                f"the model has not been {'forked' if self._is_loaded else 'loaded'} within {self._timeout:g} s: the "
                f"loader is in {where}. Pass a larger timeout= if it needs longer"
            )
            self._tell_all(wire.ProcessEnded(text, is_final=True, is_whole=True))
        elif code >= 0:
            what = "has ended: its" if self._is_loaded else "cannot be loaded: the"
            text = f"the model {what} loader ended its process with exit status {code}"
            self._tell_all(wire.ProcessEnded(text, is_final=True, is_whole=True, log=wire.end_of_log(self._folder)))
        else:
            self._tell_all(
                wire.ProcessEnded(self._how(code), was_computing=not self._is_loaded, log=wire.end_of_log(self._folder))
            )

    def _tell_all(self, ended: wire.ProcessEnded) -> None:
        """Say why there is no model, and end; if it was never there, not before the first task has come."""
        if self._is_over:
            return
        self._last_word, self._used = self._last_word or ended, time.monotonic()
        self._listener.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                control, _ = self._listener.accept()
                self._number += 1
                self._clients[self._number] = _Client(control)
        for client in self._clients.values():
            self._tell(client, self._last_word)
        self._is_over = self._is_loaded or bool(self._clients)

    def _tell(self, client: _Client, ended: wire.ProcessEnded) -> None:
        with suppress(OSError):
            client.control.sendall(wire.ENDED)
            wire.send(client.control, ended)

    def _lose(self, place: int, code: int) -> None:
        """A process that computes has ended: tell its tasks, and connect them to others.

        If it was the loader, there will be none: tasks start another server.
        """
        worker = self._workers[place]
        assert worker is not None
        self._is_over = self._is_over or worker is self._loader
        _, culprit = SLOT.unpack_from(self._slots, SLOT.size * place)
        SLOT.pack_into(self._slots, SLOT.size * place, 0.0, 0)
        with suppress(KeyError):
            self._selector.unregister(worker.line)
        worker.line.close()
        self._workers[place] = None
        for number, client in list(self._clients.items()):
            if client.place != place:
                continue
            client.place = None
            ended = self._end_of(worker.pid, code, number, culprit)
            self._tell(client, ended)
            if not ended.is_final and not self._is_over:
                self._connect(number)

    def _end_of(self, pid: int, code: int, task: int, culprit: int) -> wire.ProcessEnded:
        """Return what one of its tasks is told of a process that has ended."""
        if not pid:
            return wire.ProcessEnded("could not be forked", log=wire.end_of_log(self._folder))
        is_hung = culprit == 0 and pid in self._stuck  # before it had any rows
        if task != culprit and (culprit or code < 0) and not is_hung:  # it was killed, or ended for another task's rows
            return wire.ProcessEnded("", was_computing=False)
        if where := self._stuck.get(pid):
            text = (
                f"the model has not computed a batch within {self._timeout:g} s: it is in {where}. Pass a larger "
                "timeout= if it needs longer"
            )
            return wire.ProcessEnded(text, is_final=True, is_whole=True)
        return wire.ProcessEnded(self._how(code), is_final=code >= 0, log=wire.end_of_log(self._folder))

    def _how(self, code: int) -> str:
        ooms, self._ooms = self._ooms, processes.oom_kills()
        return how_killed(code, self._ooms > ooms)

    @property
    def _timeout(self) -> float:
        """The largest of the tasks, which may be of calls with others."""
        return max([client.timeout for client in self._clients.values()], default=self._first_timeout)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        is_idle = not self._clients and now - self._used > self._keep
        if not os.path.exists(self._folder) or (is_idle and (self._is_loaded or self._last_word is not None)):
            self._is_over = True
        for place, worker in enumerate([*self._workers, self._loader]):
            if worker is not None and worker.pid:
                began, _ = SLOT.unpack_from(self._slots, SLOT.size * place)
                self._end_if_stuck(worker.pid, began, now)

    def _end_if_stuck(self, pid: int, began: float, now: float) -> None:
        """Ask a process for its stack once its time is over, and kill it a turn later."""
        if not began or now - began <= self._timeout or pid in self._stuck:
            return
        path = Path(_stack_file(self._folder, pid))
        batch, asked = self._asked.get(pid, (0.0, 0.0))
        if batch != began:
            self._asked[pid] = began, now
            with suppress(OSError):
                path.write_text("")
                os.kill(pid, MAIN_STACK_SIGNAL)
        elif now - asked >= _TURN:
            text = ""
            with suppress(OSError):
                text = path.read_text(errors="replace")
            self._stuck[pid] = stacks.where(text)
            for each in [pid, *processes.descendants(pid)]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)


def ready(selector: selectors.BaseSelector) -> Iterator[selectors.SelectorKey]:
    """Yield what can be read within a turn, but for what has been unregistered, and may be closed, meanwhile."""
    for key, _ in selector.select(_TURN):
        if key in selector.get_map().values():
            yield key


def show_stack(folder: str) -> None:
    """Let the server ask for this process's stack, even while it waits in C code."""
    _open.append(open(_stack_file(folder, os.getpid()), "ab"))
    faulthandler.register(MAIN_STACK_SIGNAL, file=_open[-1], all_threads=False)


def _stack_file(folder: str, pid: int) -> str:
    return os.path.join(folder, f"stack-{pid}")


def how_killed(code: int, oom: bool) -> str:
    """Return how a process has ended, and what helps if that was for lack of memory."""
    how = wire.how_ended(code)
    if -code != signal.SIGKILL or not oom:
        return how
    return (
        f"{how}, most likely for lack of memory: the kernel's out-of-memory killer was active at that "
        f"time, and this machine or container has {mebibytes(limits.total_memory())}. Pass a smaller batch_rows= or "
        "processes_per_node=, or give executors more memory (spark.executor.memoryOverhead)"
    )
