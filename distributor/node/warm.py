"""The warm process of an executor or a driver.

It forks the agents of runs, and the servers of models that score rows. This is safe, and no fork sees anything of an
earlier one: it runs no user code but the imports of ``preload``, touches no accelerator, and starts no thread and no
parallel region. It ends with its executor or driver, or when nobody has used it for ``keep_warm`` seconds, or after its
last fork if it is to be replaced, for example because a loaded module's file has changed. How runs find it:
:mod:`distributor.schedulers.hosting.warm_client`.
"""

from __future__ import annotations

import fcntl
import gc
import hmac
import importlib
import json
import os
import shutil
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from distributor.channel import control
from distributor.channel.control import OUTDATED, UNFIT, peer_user
from distributor.machine import bootstrap, folders, forks, processes
from distributor.node import reaper
from distributor.rank import lookups
from distributor.values import messages

_ASK_TIMEOUT = 2.0  # seconds for each part of a request, once its connection is accepted, which is after the imports

_TOKEN_BYTES = 32

_LONGEST_WAIT = 3600.0  # seconds; the time-out of poll(2) is in milliseconds, of 31 bits

_MOST_DESCRIPTORS = 6  # current directory, standard output and error, up to three sockets


def main(_placeholder: str, folder: str, owner_pid: str, listener: str, keep: str, preload: str) -> None:
    """Fork a guard, which forks the warm process, and return at once (entry point).

    A client that wants an agent waits for the end of this process. The guard and the warm process go on as orphans.
    """
    if os.fork() == 0:
        try:
            warm, owner = bootstrap.title("warm"), int(owner_pid)
            reaper.fork(warm, bootstrap.title("guard", owner), [int(listener)], owner, folder)
            _serve(folder, owner, socket.socket(fileno=int(listener)), float(keep), json.loads(preload))
        except BaseException:
            traceback.print_exc()  # stderr is the log file in the folder
        finally:
            os._exit(1)


def _serve(folder: str, owner_pid: int, listener: socket.socket, keep: float, preload: list[str]) -> None:
    with folders.claim(folder) as lock:
        owner = processes.pidfd_open(owner_pid)
        Path(folder, "pid").write_text(f"{os.getpid()} {processes.start_time(os.getpid())}")
        gc.disable()  # makes the imports a seventh faster
        notes, unfit = _import(preload, Path(folder, "importing"))
        lookups.switch_off(folder)
        files = _files_of_modules()
        gc.collect()
        gc.freeze()  # keeps existing objects shared between all forks: the collector does not write to their pages
        gc.enable()
        if not Path(folder, "socket").is_socket():
            return  # another process has replaced this one meanwhile, or the folder is gone
        Path(folder, "ready").touch()
        folders.remove_stale()  # folders of runs that were cancelled during the imports
        _Warm(folder, owner, listener, lock.fileno(), keep, files, notes, unfit).run()


def _import(preload: list[str], now: Path) -> tuple[list[str], str | None]:
    """Import what agents, launchers and ranks need; the file ``now`` tells waiting clients the present module.

    Return notes on modules that cannot be preloaded, and why this process must not be forked, if so. ImportError
    without torch.
    """
    _say(now, "torch")
    for name in (
        "torch",
        "distributor.node.agent",
        "distributor.node.launcher",
        "asyncio",
        "ssl",
        "concurrent.futures.thread",
    ):
        importlib.import_module(name)
    notes = []
    for name in preload:
        _say(now, name)
        try:
            importlib.import_module(name)
        except Exception as error:
            notes.append(f"cannot preload {name!r} ({type(error).__name__}: {error}): ranks import it themselves")
    broken = forks.what_breaks()
    if broken is None:
        return notes, None
    return notes, f"cannot fork ranks: a module in preload={preload} {broken}: leave that module out of preload"


def _say(file: Path, text: str) -> None:
    with suppress(OSError):  # a full disk must not prevent the import
        file.write_text(text)


def _files_of_modules() -> dict[str, tuple[int, int]]:
    """Return modification time and size of the loaded modules' files."""
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            with suppress(OSError):  # the module is inside a zip file
                found[file] = _version(file)
    return found


def _version(file: str) -> tuple[int, int]:
    about = os.stat(file)
    return about.st_mtime_ns, about.st_size


class _Warm:
    def __init__(
        self,
        folder: str,
        owner: int,
        listener: socket.socket,
        lock: int,
        keep: float,
        files: dict[str, tuple[int, int]],
        notes: list[str],
        unfit: str | None,
    ) -> None:
        self._folder = folder
        self._owner = owner
        self._listener: socket.socket | None = listener
        self._token = Path(folder, "token").read_bytes()
        self._lock = lock
        self._keep = keep
        self._files = files
        self._notes = notes
        self._unfit = unfit
        self._guard = os.getppid()
        self._forks: dict[int, int] = {}  # living ones: pids by process descriptor

    def run(self) -> None:
        """Serve until the executor or driver ends, or for ``keep`` seconds nobody asks and no fork lives.

        Once retired, only wait until all forks have ended.
        """
        end = time.monotonic() + self._keep
        while self._listener is not None or self._forks:
            watched = [self._owner, *self._forks]
            if self._listener is not None:
                watched.append(self._listener.fileno())
            ready = processes.readable(watched, _LONGEST_WAIT if self._forks else self._left(end))
            if self._owner in ready:
                break
            for descriptor in ready:
                if descriptor in self._forks:
                    os.waitpid(self._forks.pop(descriptor), 0)
                    os.close(descriptor)
            if self._listener is not None and self._listener.fileno() in ready:
                self._answer(self._listener)
            if ready or self._forks:
                end = time.monotonic() + self._keep
            elif time.monotonic() >= end and self._leave_if_nobody_comes():
                return
        self._leave()

    def _left(self, end: float) -> float:
        return min(_LONGEST_WAIT, max(0.0, end - time.monotonic()))

    def _answer(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError, ValueError):  # the client has ended, or is no part of this package
            if peer_user(connection) != os.geteuid():
                return
            connection.settimeout(_ASK_TIMEOUT)
            shown, descriptors, _, _ = socket.recv_fds(
                connection, _TOKEN_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            try:
                if not hmac.compare_digest(shown, self._token):
                    return
                asked = control.receive(connection)
                if asked is None:
                    return
                request = messages.decode(asked)
                if not isinstance(request, messages.Fork) or self._is_outdated():
                    self._retire()
                    connection.sendall(OUTDATED)
                    return
                if self._unfit is not None:
                    connection.sendall(UNFIT + self._unfit.encode())
                    return
                pid = self._fork(request, descriptors, connection)
                forked = processes.pidfd_open(pid)
                self._forks[forked] = pid
                socket.send_fds(connection, [str(pid).encode()], [forked])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _is_outdated(self) -> bool:
        """Return whether a new warm process must replace this one.

        Either a loaded module's file has changed, or the guard was killed, so that nothing would clean up after an
        agent.
        """
        if os.getppid() != self._guard:
            return True
        try:
            return any(_version(file) != version for file, version in self._files.items())
        except OSError:
            return True

    def _retire(self) -> None:
        """Accept no more requests. All files but the socket stay, since forks still use them."""
        if self._listener is not None:
            with suppress(OSError):  # still this process's socket, since others replace it only once it is closed
                os.unlink(Path(self._folder, "socket"))
            self._listener.close()
            self._listener = None

    def _leave_if_nobody_comes(self) -> bool:
        try:
            descriptor = os.open(self._folder, os.O_RDONLY)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._listener is not None and processes.readable([self._listener.fileno()], 0):
                return False
            self._remove_folder()
            return True
        except OSError:  # a client has locked the folder, and will connect
            return False
        finally:
            os.close(descriptor)

    def _leave(self) -> None:
        with suppress(OSError):
            descriptor = os.open(self._folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._remove_folder()
            finally:
                os.close(descriptor)

    def _remove_folder(self) -> None:
        """Remove the folder, unless its token shows that a new warm process uses it."""
        if Path(self._folder, "token").read_bytes() == self._token:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _fork(self, request: messages.Fork, descriptors: list[int], connection: socket.socket) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become(request, descriptors, connection)
        return pid

    def _become(self, request: messages.Fork, descriptors: list[int], connection: socket.socket) -> NoReturn:
        """Make this fork look like a new process of the client, then run the part in it."""
        try:
            assert self._listener is not None
            for descriptor in (self._owner, self._lock, *self._forks):
                os.close(descriptor)
            self._listener.close()
            connection.close()
            os.setsid()
            here, out, err, *rest = descriptors
            os.fchdir(here)
            for descriptor, target in ((out, 1), (err, 2)):
                os.dup2(descriptor, target)
            for descriptor in (here, out, err):
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request.environ)
            bootstrap.overwrite(bootstrap.title("warm"), bootstrap.title(request.part, request.owner))
            part = importlib.import_module(bootstrap.PARTS[request.part])
            part.serve(dict(zip(request.names, rest)), request.owner, self._notes, *request.arguments)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
