"""The driver's door: a socket that listens for nodes, and admits TLS connections that show the run's token."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from distributor.channel.tls import TOKEN_BYTES, make_tls
from distributor.values.plan import Endpoint

#: Seconds that a new connection may take for the TLS handshake, and then again for showing the token.
_HELLO_TIMEOUT = 10.0

#: Maximum number of *strangers*: connections that have not yet shown the token and sent a valid first message. The
#: maximum is twice the number of tasks if that is more. A further connection ends the oldest stranger, so that a flood
#: of connections keeps no node out for long.
_MAX_STRANGERS = 128

#: The type of a function that serves a connection until it ends.
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

#: The type of a function that runs a coroutine as an asyncio task until the coroutine ends or the server closes.
Start = Callable[[Coroutine[Any, Any, None]], Awaitable["asyncio.Task[None]"]]


class Door:
    """The driver's listening socket for one job, with the connections whose first message has not been accepted yet.

    Args:
        serve: serves each connection that has shown the run's token, and calls :meth:`admit` if the first message is
            valid.
        tasks: number of tasks that may connect at the same time.
    """

    def __init__(self, serve: Serve, tasks: int) -> None:
        self._serve = serve
        self._most = max(_MAX_STRANGERS, 2 * tasks)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._listening: socket.socket | None = None
        self._context: ssl.SSLContext | None = None
        #: The address ``host:port`` to which nodes connect; set once the socket listens.
        self.address: str | None = None

    def listen(self, bind: str, advertise: str, ports: tuple[int, int] | None) -> Endpoint:
        """Listen on the first free port of ``ports``, and return the address, certificate and token that nodes need.

        Connections are accepted once :meth:`accept` runs.

        Args:
            bind: the address at which the socket listens.
            advertise: the address to which nodes connect.
            ports: first and last port to try; ``None`` for any free port.

        Raises:
            OSError: the address ``bind`` does not belong to this machine, none of the ports is free, or the TLS key
                cannot be written to a temporary file.
        """
        self._context, certificate = make_tls()
        self._listening = _bind(bind, range(ports[0], ports[1] + 1) if ports is not None else (0,))
        port = self._listening.getsockname()[1]
        self.address = f"{advertise}:{port}"
        return Endpoint(advertise, port, certificate, self._token)

    async def accept(self, start: Start) -> None:
        """Accept connections until the current asyncio task is cancelled."""
        assert self._listening is not None
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            except OSError:  # too many open files, or the other side has already left
                await asyncio.sleep(0.1)
                continue
            task = await start(self._meet(sock))
            self._strangers[task] = None
            task.add_done_callback(lambda ended: self._strangers.pop(ended, None))
            if len(self._strangers) > self._most:
                next(iter(self._strangers)).cancel()

    def admit(self) -> None:
        """Stop counting the current asyncio task's connection as a stranger: it has sent a valid first message."""
        task = asyncio.current_task()
        if task is not None:
            self._strangers.pop(task, None)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()

    async def _meet(self, sock: socket.socket) -> None:
        """Do the TLS handshake of a new connection, check the token that it shows, and serve the connection."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: Any = None
        writer: asyncio.StreamWriter | None = None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=_HELLO_TIMEOUT
            )
            shown = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), _HELLO_TIMEOUT)
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


def _bind(address: str, ports: range | tuple[int, ...]) -> socket.socket:
    """Return a socket that listens on the first free port of ``ports``."""
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
