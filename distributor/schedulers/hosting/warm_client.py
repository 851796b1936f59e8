"""Asks a warm process for an agent, or for the server of a model.

A *warm process* has imported torch, and forks these for the Spark tasks of one executor, or for one driver. They find
it through a private folder, whose name is a digest of the executor or driver and of everything that a fork inherits:
the interpreter, this package, the environment, the limits, the preloaded modules, ``keep_warm``. If none answers, one
is started; if that fails, the agent is a new process. Standard library only: this module is pickled by value into
Spark's workers.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from distributor.channel import control
from distributor.channel.control import OUTDATED, UNFIT, peer_user
from distributor.machine import allocator, bootstrap, folders, processes
from distributor.machine.bootstrap import PLACEHOLDER, UNMARKED
from distributor.schedulers.hosting.agents import Agent, anew
from distributor.values import environment, layout, messages
from distributor.values.environment import NODE_ID
from distributor.values.job import Warmth

_PATIENCE = 5.0  # seconds that a ready warm process may take to fork an agent; normally milliseconds
_IMPORT_PATIENCE = 300.0  # seconds for its imports; then it is killed
_LOOK = 0.1  # seconds between checks of whether a waiting caller still wants its agent

#: Warm processes of one executor or driver that accept requests. A retired one ends once all its agents have.
_MOST = 3

#: Variables that may differ between runs of a warm process: they are read only after the fork, by Spark, or not at all.
_VOLATILE = frozenset(
    {
        *environment.CONTRACT,
        environment.CHECK_GPUS,
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
    """Return an agent that a warm process has forked, and its control line; ``None`` if none forks one that is wanted.

    If the warm process must not be forked, the agent is a new process, with the reason in ``note``. OSError: a warm
    process cannot be found or started.
    """
    environ = _environ(warmth, task_cpus)
    for _ in range(3):
        folder = _folder(root, owner, warmth, environ)
        try:
            connection, fresh = _reach(folder, root, owner, warmth, environ)
        except FileNotFoundError:  # the previous process has just ended and removed its folder
            continue
        # The request of an earlier try may still start an agent, which finds its own line closed, and ends.
        ours, theirs = socket.socketpair()
        with connection, theirs:
            files = {"control": theirs.fileno(), **{name: each.fileno() for name, each in inherit.items()}}
            answer, descriptor = _ask(connection, folder, "agent", files, (), wanted, importing)
        if descriptor >= 0:
            return Agent(int(answer), descriptor), ours
        ours.close()
        if answer.startswith(UNFIT):
            return anew(root, inherit, answer[len(UNFIT) :].decode())
        # A new warm process most likely failed to import a module: a new agent fails in the same way, and reports it.
        if not wanted() or (fresh and answer != OUTDATED):
            return None
    return None


def forks_model(
    root: str, owner: int, warmth: Warmth, task_cpus: int, files: Mapping[str, int], arguments: Sequence[str]
) -> bool:
    """Return whether a warm process has forked the server of a model. OSError: none can be found or started."""
    environ = _environ(warmth, task_cpus)
    folder = _folder(root, owner, warmth, environ)
    connection, _ = _reach(folder, root, owner, warmth, environ)
    with connection:
        _, descriptor = _ask(connection, folder, "model", files, arguments)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def _environ(warmth: Warmth, task_cpus: int) -> dict[str, str]:
    """Return the environment of a warm process while it imports."""
    overlay = environment.overlay(os.environ, task_cpus, warmth["ranks_per_task"], warmth["spark_cpus"])
    environ = environment.apply(os.environ, overlay)
    environ = {**environ, **environment.waiting({**environ, **warmth["env"]}), **warmth["env"]}
    environ = _with_absolute_path(environ)
    if not warmth["use_gpu"]:
        environ |= allocator.huge_pages(environ)  # forks keep the effect, though they get the caller's environment
    return environ


def _with_absolute_path(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment with absolute folders in PYTHONPATH: the warm process runs in ``/``."""
    path = environ.get("PYTHONPATH")
    if not path:
        return environ
    return {**environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))}


def _folder(root: str, owner: int, warmth: Warmth, environ: Mapping[str, str]) -> str:
    """Return the folder of the warm process with this owner and environment, made if it is missing."""
    package: object = root
    if os.path.isfile(root):
        with open(root, "rb") as file:
            package = hashlib.sha256(file.read()).hexdigest()
    same = {
        name: value
        for name, value in environ.items()
        if name not in _VOLATILE and not name.startswith(_VOLATILE_PREFIXES)
    }
    who = [os.readlink("/proc/self/ns/pid"), os.geteuid(), owner, processes.start_time(owner)]
    which = [sys.executable, sys.version, package, warmth["preload"], warmth["keep"], same, processes.inherited()]
    folder = os.path.join(tempfile.gettempdir(), f"{layout.PREFIX}warm-{_digest(who)}-{_digest(which)}")
    folders.make_private(folder)
    return folder


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _short(folder: str) -> Iterator[tuple[str, int]]:
    """Yield a short path to a folder, and its descriptor: a socket's path may have at most 107 bytes (unix(7))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}", descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: str) -> Iterator[str]:
    """Let no other process start or end the folder's warm process during the ``with`` block. Yield a short path."""
    with _short(folder) as (short, descriptor):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(f"{folder} was replaced")
        yield short


def _reach(
    folder: str, root: str, owner: int, warmth: Warmth, environ: Mapping[str, str]
) -> tuple[socket.socket, bool]:
    """Connect to the warm process of a folder, or start one. Return the connection, and whether it was started now."""
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
    """Connect to the warm process of a folder, given by a short path."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_PATIENCE)
        connection.connect(f"{folder}/socket")
        if peer_user(connection) != os.geteuid():
            raise PermissionError(f"{folder}/socket belongs to another user")
        return connection
    except BaseException:
        connection.close()
        raise


def _start(folder: str, short: str, root: str, owner: int, warmth: Warmth, environ: Mapping[str, str]) -> None:
    """Start a warm process. Clients can connect at once, and wait until it is ready."""
    # The files of a previous warm process, which has ended or accepts no more requests.
    for name in ("socket", "importing", "ready", "owner", "pid"):
        with suppress(FileNotFoundError):
            os.unlink(f"{short}/{name}")
    if os.path.isfile(root):  # a zip, which is removed with the run, so the warm process needs a copy
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
    starter.wait()  # ends at once and leaves the warm process as an orphan
    if owner == os.getpid() == 1:  # its end kills all processes of the container, before they can remove the folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _retire_oldest(folder)


def _retire_oldest(newest: str) -> None:
    """Let the oldest warm processes of an owner accept no more requests, if it has more than :data:`_MOST`.

    A warm process that was killed counts until its folder is removed.
    """
    owner = os.path.basename(newest).rpartition("-")[0]
    parent = os.path.dirname(newest)
    others = [os.path.join(parent, name) for name in os.listdir(parent) if name.startswith(f"{owner}-")]
    ages = []
    for other in others:
        with suppress(OSError):
            ages.append((os.stat(os.path.join(other, "socket")).st_mtime, other))
    for _, old in sorted(ages)[:-_MOST]:
        with suppress(OSError), _short(old) as (short, _), _connect(short) as connection:
            _send(connection, old, messages.Retire(), [])


def _send(connection: socket.socket, folder: str, request: messages.Message, descriptors: list[int]) -> None:
    with open(os.path.join(folder, "token"), "rb") as token:
        socket.send_fds(connection, [token.read()], descriptors)
    control.send(connection, messages.encode(request))


def _ask(
    connection: socket.socket,
    folder: str,
    part: str,
    files: Mapping[str, int],
    arguments: Sequence[str],
    wanted: Callable[[], bool] = lambda: True,
    importing: Callable[[str], None] = lambda module: None,
) -> tuple[bytes, int]:
    """Ask a warm process to fork a part. Return the answer, and the fork's process descriptor or -1."""
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        request = messages.Fork(part, tuple(files), os.getpid(), dict(os.environ), tuple(arguments))
        descriptors = [here, 1, 2, *files.values()]
        try:
            _send(connection, folder, request, descriptors)
        except OSError:  # the warm process has just ended
            return b"", -1
    finally:
        os.close(here)
    deadline, ready, shown = time.monotonic() + _IMPORT_PATIENCE, False, ""
    while not processes.readable([connection.fileno()], _LOOK):
        if not ready and os.path.exists(os.path.join(folder, "ready")):
            deadline, ready = time.monotonic() + _PATIENCE, True
        if not ready and (module := _imported_now(folder)) not in ("", shown):
            shown = module
            importing(module)
        if not wanted():
            return b"", -1
        if time.monotonic() > deadline:
            _kill(folder)
            return b"", -1
    if shown:
        importing("")
    try:
        answer, received, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return b"", -1
    return answer, received[0] if received else -1


def _imported_now(folder: str) -> str:
    """Return the module that a warm process is importing, or "" before the first."""
    try:
        with open(os.path.join(folder, "importing")) as file:
            return file.read()
    except OSError:
        return ""


def _kill(folder: str) -> None:
    """Kill a warm process that does not answer."""
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
