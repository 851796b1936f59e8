"""Stop torch from looking up the host names of the processes that it talks to. Torch needs the names for logs only.

Torch's rendezvous store looks up the name of each address that connects to it, and each client looks up the name of
the store (``formatSockAddr`` calls getnameinfo(3)). If a name server does not answer, each look-up takes 5 s or more.

A process makes no more look-ups of host names once one look-up has failed (pytorch pull request 159596). This module
therefore makes one look-up fail. It connects a client to a Unix socket, and then starts a store on this socket. The
store looks up the client's name. For a Unix socket, getnameinfo(3) takes the socket's path as the name of the port. The
client's path is too long for such a name, so the look-up fails. This look-up sends no query, and changes no setting of
the resolver. Forks of the process make no look-ups either.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from distributor.rank.imports import on_import

#: The torch module that a process imports before it uses a store.
_RENDEZVOUS = "torch.distributed.rendezvous"

#: Whether this process, or the one that it was forked from, has tried to switch the look-ups off.
_done = False

#: If torch's rendezvous store takes longer than this number of seconds to start, it has most likely waited for a name
#: server. The resolver's time-out is 5 s by default (resolv.conf(5)).
_SLOW = 4.5

#: A name that is too long for getnameinfo(3), where a port's name may have NI_MAXSERV (32) bytes including a null byte.
_LONG = "p" * 40

#: An invalid address, so that no name server is asked about it.
_NOBODY = "::1%no interface"


def switch_off(folder: str) -> None:
    """Stop torch from looking up the host names of other processes, in this process and in its later forks.

    Torch makes no more look-ups of host names once one has failed, so this function makes one fail. It starts a store
    of torch on a Unix socket to which a client is already connected. The store's thread looks up the name of this
    client. For a Unix socket, the name is the socket's path. The path of this client is too long for getnameinfo(3), so
    the look-up fails. The store's constructor also tries to connect to the store, but at an invalid address. It
    therefore raises an error, which is ignored. The store's thread has ended when this function returns.

    Args:
        folder: a private folder. During the call, it holds the Unix sockets of a temporary store of torch and of a
            client that connects to this store.
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
    """Return a warning if torch's rendezvous store took a long time to start on this node; otherwise ``None``.

    Args:
        seconds: number of seconds that the store took to start.
        address: the address of the store, whose host name torch looks up at the start.
    """
    if seconds < _SLOW:
        return None
    return (
        f"waited {seconds:.0f} s for torch's rendezvous store, most likely because a name server did not answer for "
        f"{address}: add the nodes to /etc/hosts"
    )


def switch_off_on_import(folder: str) -> None:
    """Call :func:`switch_off`, which ends look-ups of host names, on the import of ``torch.distributed.rendezvous``."""
    on_import(_RENDEZVOUS, lambda module: switch_off(folder))


@contextmanager
def _sockets(folder: str) -> Iterator[tuple[int, str]]:
    """Create a listening Unix socket and connect a client to it. Yield the listening socket's descriptor and address.

    The caller must close the file descriptor of the listening socket.
    """
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
