"""Stop torch from looking up the host names of the processes that it talks to. Torch needs the names for logs only.

Its rendezvous store looks up the name of each address that connects to it, and each client the name of the store
(``formatSockAddr`` calls getnameinfo(3)). If a name server does not answer, each look-up takes 5 s or more. A process
and its forks make no more look-ups once one has failed (pytorch pull request 159596), so this module makes one fail. It
starts a store on a Unix socket to which a client is already connected. For a Unix socket, getnameinfo(3) takes the path
as the name of the port, and the client's is too long. No query is sent, and no setting of the resolver changes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from distributor.machine.imports import on_import

_RENDEZVOUS = "torch.distributed.rendezvous"  # imported before a store is used

_done = False  # whether it was tried, in this process or in the one that it was forked from

_SLOW = 4.5  # seconds after which the start of a store was slow; the resolver's time-out is 5 s (resolv.conf(5))

_LONG = "p" * 40  # too long for a port's name in getnameinfo(3), of NI_MAXSERV (32) bytes with a null byte

_NOBODY = "::1%no interface"  # invalid, so that no name server is asked about it


def switch_off(folder: str) -> None:
    """Make one look-up fail in this process, for it and its later forks. ``folder`` is private, for the sockets.

    The store's constructor raises, since it also connects to an invalid address. Its thread has ended by then.
    """
    global _done
    if _done:
        return
    _done = True
    with suppress(Exception), _sockets(folder) as (listener, address), _silence():
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list what it exports

        TCPStore(
            _NOBODY,
            int.from_bytes(address[:2].encode(), "big"),  # what torch reads as the port of a Unix socket
            is_master=True,
            wait_for_workers=False,
            use_libuv=False,
            master_listen_fd=listener,
            timeout=timedelta(milliseconds=-1),  # negative, so that the store does not try twice
        )


def warning(seconds: float, address: str) -> str | None:
    """Return a warning if torch's rendezvous store at ``address`` took long to start on this node."""
    if seconds < _SLOW:
        return None
    return (
        f"waited {seconds:.0f} s for torch's rendezvous store, most likely because a name server did not answer for "
        f"{address}: add the nodes to /etc/hosts"
    )


def switch_off_on_import(folder: str) -> None:
    """Call :func:`switch_off` once this process imports ``torch.distributed.rendezvous``."""
    on_import(_RENDEZVOUS, lambda module: switch_off(folder))


@contextmanager
def _sockets(folder: str) -> Iterator[tuple[int, str]]:
    """Connect a client to a Unix socket. Yield the listener's address, and a descriptor for the caller to close."""
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY)  # a socket's path is limited to 107 bytes (unix(7))
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
    """Discard what is written to standard error within this context."""
    err, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(err, 2)
        os.close(err)
        os.close(nowhere)
