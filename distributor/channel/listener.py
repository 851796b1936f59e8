"""The driver's listening socket: admits TLS connections that show the run's token."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import ssl
from asyncio import sslproto
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from distributor.channel.tls import TOKEN_BYTES, make_tls
from distributor.values.plan import Endpoint

_HELLO_TIMEOUT = 10.0  # seconds for the TLS handshake, and again for the token

#: Maximum number of connections without a valid first message; twice the number of tasks if that is more. A further
#: one ends the oldest, so that a flood of connections keeps no node out for long.
_MAX_UNAUTHENTICATED = 128

#: Serves a connection until it ends.
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

#: Runs a coroutine as an asyncio task until it ends or the server closes.
Start = Callable[[Coroutine[Any, Any, None]], Awaitable["asyncio.Task[None]"]]


#: Whether this Python's asyncio has what :class:`_SmallTls` uses. Without it, connections take more memory.
_SHRINKS = all(hasattr(sslproto.SSLProtocol, name) for name in ("max_size", "_get_app_transport"))


class _SmallTls(sslproto.SSLProtocol):
    """TLS as in ``loop.start_tls``, with a smaller buffer for what has been read: asyncio's has 256 KiB."""

    max_size = 16 << 10


def widen(writer: asyncio.StreamWriter) -> None:
    """Read in pieces as large as asyncio's from now on."""
    tls = getattr(writer.transport, "_ssl_protocol", None)
    if tls is not None:  # a socket pair has none
        tls.max_size = sslproto.SSLProtocol.max_size


class TlsListener:
    """The listening socket of one job.

    ``serve`` gets each connection that has shown the token, and calls :meth:`admit` once its first message is valid.
    """

    def __init__(self, serve: Serve, tasks: int) -> None:
        self._serve = serve
        self._most = max(_MAX_UNAUTHENTICATED, 2 * tasks)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._unauthenticated: dict[asyncio.Task[None], None] = {}
        self._listening: socket.socket | None = None
        self._context: ssl.SSLContext | None = None
        self.address: str | None = None  # host:port for nodes, once the socket listens

    def listen(self, bind: str, advertise: str, ports: tuple[int, int] | None) -> Endpoint:
        """Listen at ``bind`` on the first free port of ``ports``, which are first and last.

        OSError if the address is not this machine's, no port is free, or the TLS key cannot be written to a file.
        """
        self._context, certificate = make_tls()
        self._listening = _bind(bind, range(ports[0], ports[1] + 1) if ports is not None else (0,))
        port = self._listening.getsockname()[1]
        self.address = f"{advertise}:{port}"
        return Endpoint(advertise, port, certificate, self._token)

    async def accept(self, start: Start) -> None:
        assert self._listening is not None
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            except OSError:  # too many open files, or the other side has already left
                await asyncio.sleep(0.1)
                continue
            task = await start(self._meet(sock))
            self._unauthenticated[task] = None
            task.add_done_callback(lambda ended: self._unauthenticated.pop(ended, None))
            if len(self._unauthenticated) > self._most:
                next(iter(self._unauthenticated)).cancel()

    def admit(self) -> None:
        """Count the current asyncio task's connection as authenticated."""
        task = asyncio.current_task()
        if task is not None:
            self._unauthenticated.pop(task, None)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()

    async def _meet(self, sock: socket.socket) -> None:
        """Do the handshake, check the token, and serve the connection."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: Any = None
        writer: asyncio.StreamWriter | None = None
        try:
            transport = await self._secure(loop, protocol, sock)
            async with asyncio.timeout(_HELLO_TIMEOUT):
                shown = await reader.readexactly(TOKEN_BYTES)
            if not hmac.compare_digest(shown, self._token):
                return
            writer, transport = asyncio.StreamWriter(transport, protocol, reader, loop), None
        except (OSError, EOFError):
            return
        finally:
            if transport is not None:
                transport.abort()
            elif writer is None:
                sock.close()
        await self._serve(reader, writer)

    async def _secure(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, sock: socket.socket) -> Any:
        """Do the handshake, and return the transport."""
        assert self._context is not None
        if not _SHRINKS:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=_HELLO_TIMEOUT
            )
            return transport
        met = loop.create_future()
        tls: Any = _SmallTls(
            loop, protocol, self._context, met, server_side=True, ssl_handshake_timeout=cast(Any, _HELLO_TIMEOUT)
        )
        raw, _ = await loop.connect_accepted_socket(lambda: tls, sock)
        try:
            await met
        except BaseException:
            raw.abort()
            raise
        return tls._get_app_transport()


def _bind(address: str, ports: range | tuple[int, ...]) -> socket.socket:
    family, _, _, _, at = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    failed: OSError | None = None
    for port in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((at[0], port, *at[2:]))
            listening.listen(1024)
            listening.setblocking(False)
            return listening
        except OSError as error:
            listening.close()
            failed = error
    assert failed is not None
    raise failed
