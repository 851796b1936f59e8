"""How an owner (a Spark task's Python worker, or the driver) gets an agent: forked by a warm process, or started anew.

A warm process serves one executor or driver. It is found in a private folder whose name says all that a fork takes from
the process it is forked from: who it is for, which Python and package, environment, limits. What another run would have
to have different gets another warm process. Where there is none that answers, one is started; where that cannot be, the
agent is started anew. Standard library only, and pickled by value into Spark's workers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from distributor.channel import control
from distributor.channel.control import OUTDATED, UNFIT, peer_user
from distributor.hosting.agents import Agent, anew
from distributor.machine import allocator, bootstrap, folders, processes
from distributor.machine.bootstrap import PLACEHOLDER, UNMARKED
from distributor.values import environment
from distributor.values.environment import NODE_ID
from distributor.values.job import Warmth

if TYPE_CHECKING:
    pass


#: Seconds in which a warm process that is up forks an agent: it takes milliseconds.
_PATIENCE = 5.0

#: Seconds that a warm process gets to import what it should; longer than that is given up.
_IMPORT_PATIENCE = 300.0

#: Seconds between looks at whether a caller that waits for imports still wants its agent.
_LOOK = 0.1

#: Warm processes of one owner at most; one more ends the oldest.
_MOST = 3


#: Variables that may differ from run to run: they are read after the fork only, by Spark only, or by nobody
#: (``PYTEST_CURRENT_TEST``, which pytest writes for each test).
_VOLATILE = frozenset(
    {
        *environment.CONTRACT,
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "OLDPWD",
        "PWD",
        "PYTEST_CURRENT_TEST",
    }
)
_VOLATILE_PREFIXES = ("SPARK_", "PYSPARK_", "PYTHON_WORKER_", "PYTHON_UDF_", "PYTHON_FAULTHANDLER_")


def from_warm(
    root: str,
    inherit: Mapping[str, socket.socket],
    owner: int,
    warmth: Warmth,
    task_cpus: int,
    wanted: Callable[[], bool],
    importing: Callable[[str], None],
) -> tuple[Agent, socket.socket] | None:
    """An agent forked by a warm process; ``None`` if that cannot be, or is not wanted any more."""
    overlay = environment.overlay(os.environ, task_cpus, warmth["ranks_per_task"], warmth["spark_cpus"])
    environ = environment.apply(os.environ, overlay)
    environ = {**environ, **warmth["env"]}
    if not warmth["use_gpu"]:
        environ |= allocator.huge_pages(environ)  # not for the forks' own children: forks get the job's environment
    for _ in range(3):
        folder = _folder(root, owner, warmth, environ)
        try:
            connection, fresh = _reach(folder, root, owner, warmth, environ)
        except FileNotFoundError:  # the process of before has left just now, and its folder with it
            continue
        # A line for each attempt: one that is given up may still be in a queue, and end in an agent without an owner.
        ours, theirs = socket.socketpair()
        with connection, theirs:
            answer, descriptor = _ask(connection, folder, {"control": theirs, **inherit}, wanted, importing)
        if descriptor >= 0:
            return Agent(int(answer), descriptor), ours
        ours.close()
        if answer.startswith(UNFIT):
            return anew(root, inherit, answer[len(UNFIT) :].decode())
        if not wanted() or (fresh and answer != OUTDATED):  # what it needs cannot be imported: the cold way tells why
            return None
    return None


def _folder(root: str, owner: int, warmth: Warmth, environ: Mapping[str, str]) -> str:
    """Where the warm process for this owner and these wishes lives, made if it is not there.

    Raises:
        OSError: it cannot be made, or is not this user's alone.
    """
    package: object = root
    if root.endswith(".zip"):
        with open(root, "rb") as file:
            package = hashlib.sha256(file.read()).hexdigest()
    same = {
        name: value
        for name, value in environ.items()
        if name not in _VOLATILE and not name.startswith(_VOLATILE_PREFIXES)
    }
    who = [os.readlink("/proc/self/ns/pid"), os.geteuid(), owner, processes.start_time(owner)]
    what = [sys.executable, sys.version, package, warmth["preload"], warmth["keep"], same, processes.inherited()]
    folder = os.path.join(tempfile.gettempdir(), f"{folders.PREFIX}warm-{_digest(who)}-{_digest(what)}")
    folders.make_private(folder)
    return folder


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _short(folder: str) -> Iterator[tuple[str, int]]:
    """A short path of a folder, and its descriptor.

    A socket's path may have 107 bytes only (unix(7)); temporary folders of a cluster's containers have longer ones.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}", descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: str) -> Iterator[str]:
    """Keeps others from starting or ending the folder's warm process; yields a short path of the same folder.

    Raises:
        OSError: the folder has just been removed.
    """
    with _short(folder) as (short, descriptor):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(f"{folder} was replaced")
        yield short


def _reach(
    folder: str, root: str, owner: int, warmth: Warmth, environ: Mapping[str, str]
) -> tuple[socket.socket, bool]:
    """A connection to the folder's warm process, and whether it had to be started.

    Raises:
        OSError: it cannot be started, or its queue is full.
    """
    with _locked(folder) as short:
        try:
            return _connect(short), False
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        try:
            _start(folder, short, root, owner, warmth, environ)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return _connect(short), True


def _connect(folder: str) -> socket.socket:
    """A connection to the warm process of a folder, which has to have a short path."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_PATIENCE)
        connection.connect(f"{folder}/socket")
        if peer_user(connection) != os.geteuid():
            raise PermissionError(f"{folder}/socket is another user's")
        return connection
    except BaseException:
        connection.close()
        raise


def _start(folder: str, short: str, root: str, owner: int, warmth: Warmth, environ: Mapping[str, str]) -> None:
    """Starts a warm process that will serve the folder; connections wait in its queue until it can."""
    # Of one before, which is gone or serves nobody any more.
    for name in ("socket", "importing", "ready", "owner", "pid"):
        with suppress(FileNotFoundError):
            os.unlink(f"{short}/{name}")
    if root.endswith(".zip"):  # a run's own copy goes with it
        shutil.copyfile(root, f"{short}/package.new")
        os.rename(f"{short}/package.new", f"{short}/package.zip")
        root = os.path.join(folder, "package.zip")
    with open(f"{short}/token", "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as token:
        token.write(secrets.token_bytes(32))
    with socket.socket(socket.AF_UNIX) as listener, open(f"{short}/log", "wb") as log:
        listener.bind(f"{short}/socket")
        listener.listen(128)
        starter = subprocess.Popen(
            bootstrap.command(
                root,
                "warm",
                PLACEHOLDER,
                folder,
                str(owner),
                str(listener.fileno()),
                str(warmth["keep"]),
                json.dumps(warmth["preload"]),
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**environ, NODE_ID: UNMARKED.partition("=")[2]},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    starter.wait()  # it leaves a child that is nobody's, at once
    _retire_oldest(folder)


def _retire_oldest(newest: str) -> None:
    """Ends the warm process of this owner that was started first, if there are too many."""
    owner = os.path.basename(newest).rpartition("-")[0]
    parent = os.path.dirname(newest)
    others = [os.path.join(parent, name) for name in os.listdir(parent) if name.startswith(f"{owner}-")]
    ages = []
    for other in others:
        with suppress(OSError):
            ages.append((os.stat(os.path.join(other, "socket")).st_mtime, other))
    if len(ages) > _MOST:
        oldest = min(ages)[1]
        with suppress(OSError), _short(oldest) as (short, _), _connect(short) as connection:
            _send(connection, oldest, {"retire": True}, [])


def _send(connection: socket.socket, folder: str, request: Mapping[str, object], descriptors: list[int]) -> None:
    with open(os.path.join(folder, "token"), "rb") as token:
        socket.send_fds(connection, [token.read()], descriptors)
    control.send(connection, request)


def _ask(
    connection: socket.socket,
    folder: str,
    sockets: Mapping[str, socket.socket],
    wanted: Callable[[], bool],
    importing: Callable[[str], None],
) -> tuple[bytes, int]:
    """Asks for an agent: the answer, and the agent's process descriptor, or -1. A process that hangs is killed."""
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        request = {"names": list(sockets), "owner": os.getpid(), "environ": dict(os.environ)}
        descriptors = [here, 1, 2, *(sock.fileno() for sock in sockets.values())]
        try:
            _send(connection, folder, request, descriptors)
        except OSError:  # it has just ended
            return b"", -1
    finally:
        os.close(here)
    deadline, ready, told = time.monotonic() + _IMPORT_PATIENCE, False, ""
    while not processes.readable([connection.fileno()], _LOOK):
        if not ready and os.path.exists(os.path.join(folder, "ready")):
            deadline, ready = time.monotonic() + _PATIENCE, True
        if not ready and (module := _imported_now(folder)) not in ("", told):
            told = module
            importing(module)
        if not wanted():
            return b"", -1
        if time.monotonic() > deadline:
            _kill(folder)
            return b"", -1
    if told:
        importing("")
    try:
        answer, received, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return b"", -1
    return answer, received[0] if received else -1


def _imported_now(folder: str) -> str:
    """The module that a warm process is importing, "" before the first."""
    try:
        with open(os.path.join(folder, "importing")) as file:
            return file.read()
    except OSError:
        return ""


def _kill(folder: str) -> None:
    """Kills a warm process that does not answer."""
    with suppress(OSError, ValueError):
        with open(os.path.join(folder, "pid")) as file:
            pid, _, started = file.read().partition(" ")
        descriptor = processes.pidfd_open(int(pid))
        try:
            if processes.start_time(int(pid)) == started:
                processes.kill_by(descriptor, int(pid))
                processes.readable([descriptor], _PATIENCE)
        finally:
            os.close(descriptor)
