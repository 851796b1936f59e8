"""Torch asks the name server for the names of peers, for its log lines only: here that is switched off.

Torch's rendezvous store looks up the name of each address that connects to it, and each of its clients that of the
store (``formatSockAddr`` calls getnameinfo(3)). An answer that does not come costs 5 s or more, and all ranks ask at
the same instant. From torch 2.9 on, a process never asks again once one such call has failed (pytorch pull request
159596). So one is made to fail: an address that is a path, and longer than a port's name may be. Nothing is asked for
it, no setting of the resolver changes, and forks inherit the state.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType

#: The module of torch with which a process comes to use a store.
_RENDEZVOUS = "torch.distributed.rendezvous"

#: Whether it is done, in this process or the one that it was forked from.
_done = False

#: Seconds after which a store that is not up on its own machine most likely waits for a name server, whose time-out is
#: 5 s by default (resolv.conf(5)).
_SLOW = 4.5

#: Longer than the name of a port may be for getnameinfo(3): NI_MAXSERV, 32 bytes with the last one.
_LONG = "p" * 40

#: An address that cannot be one, so nobody is asked for it.
_NOBODY = "::1%no interface"


def switch_off(folder: str) -> None:
    """Has torch in this process, and in its later forks, ask for no name of a peer.

    A store listens on a socket of the file system for a moment: its thread accepts one connection, and has ended when
    this returns. The store has no client, and its constructor therefore raises.

    Args:
        folder: a private one, where the sockets lie meanwhile.
    """
    global _done
    if _done:
        return
    _done = True
    with suppress(Exception), _sockets(folder) as (listener, address), _silence():
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list what it exports

        TCPStore(
            _NOBODY,
            int.from_bytes(address[:2].encode(), "big"),  # what torch takes for the port of such a socket
            is_master=True,
            wait_for_workers=False,
            use_libuv=False,
            master_listen_fd=listener,
            timeout=timedelta(milliseconds=-1),  # past already: no second try
        )


def warning(seconds: float, address: str) -> str | None:
    """What to tell the user where a store took that long to come up on its own machine; ``None``: nothing.

    Args:
        seconds: what it took.
        address: whose name torch asks for.
    """
    if seconds < _SLOW:
        return None
    return (
        f"waited {seconds:.0f} s for torch's rendezvous store, most likely for the name of {address} from a name "
        "server that does not answer: name the nodes in /etc/hosts, or install torch 2.9 or later, which need not ask"
    )


class _OnImport(importlib.abc.MetaPathFinder):
    """Switches the look-ups off once torch's rendezvous has been imported."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._seen = False  # it stays in the list, which another thread may be going through

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _RENDEZVOUS or self._seen:
            return None
        self._seen = True
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_switch_off(module: ModuleType) -> None:
                execute(module)
                switch_off(self._folder)

            spec.loader.exec_module = execute_and_switch_off  # type: ignore[method-assign]
        return spec


def switch_off_on_import(folder: str) -> None:
    """As :func:`switch_off`, as soon as this process imports torch's rendezvous, if it does."""
    sys.meta_path.insert(0, _OnImport(folder))


@contextmanager
def _sockets(folder: str) -> Iterator[tuple[int, str]]:
    """The descriptor of a listening socket, which its user closes, and its address. A client has connected to it."""
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY)  # paths of sockets may have 107 bytes only (unix(7))
    paths = [f"/proc/self/fd/{at}/{name}-{os.getpid()}" for name in ("store", _LONG)]
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            listener.bind(paths[0])
            listener.listen()
            client.bind(paths[1])
            client.connect(paths[0])
            yield os.dup(listener.fileno()), paths[0]
    finally:
        for path in paths:
            with suppress(OSError):
                os.unlink(path)
        os.close(at)


@contextmanager
def _silence() -> Iterator[None]:
    """Keeps what torch has to say of it from standard error."""
    err, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(err, 2)
        os.close(err)
        os.close(nowhere)
