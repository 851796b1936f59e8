"""The node's side of the channel. Standard library only."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributor.channel import frames

#: Seconds to reach the driver before the run goes on without the channel.
CONNECT_TIMEOUT = 10.0

#: Seconds to wait for the driver's word that it has shown everything.
BYE_TIMEOUT = 120.0


@dataclass(frozen=True)
class Endpoint:
    """Where the driver listens. ``certificate`` (PEM) is the only one that nodes accept, ``token`` what they show."""

    host: str
    port: int
    certificate: str = field(repr=False)
    token: bytes = field(repr=False)


class Uplink:
    """An open channel. Sending to a driver that is gone is no error: ``closed`` tells."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._bye = asyncio.Event()
        self.closed = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Queues a message; small ones only, since nothing waits here."""
        self._write(frames.pack(message))

    async def send_log(self, log: frames.Log) -> None:
        """Sends a piece of a log and waits while the driver is behind."""
        self._write(frames.pack_log(log))
        try:
            await self._writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            self.closed = True

    def _write(self, data: bytes) -> None:
        if not self.closed and not self._writer.is_closing():
            self._writer.write(data)

    async def listen(self, on_order: Callable[[dict[str, Any]], None]) -> None:
        """Hands over the driver's orders until the connection ends."""
        try:
            while (message := await frames.read(self._reader)) is not None:
                if isinstance(message, frames.Log):
                    break
                if message.get("order") == "bye":
                    self._bye.set()
                else:
                    on_order(message)
        except (OSError, frames.ProtocolError):
            pass
        self.closed = True
        self._bye.set()

    async def say_bye(self) -> None:
        """Tells the driver that nothing more comes, and waits until it has shown all of it."""
        if not self.closed:
            self.send({"event": "bye"})
            try:
                await asyncio.wait_for(self._bye.wait(), BYE_TIMEOUT)
            except asyncio.TimeoutError:
                pass
        self._writer.close()


async def attach(sock: socket.socket) -> Uplink:
    """The channel over an inherited, connected socket: local mode."""
    return Uplink(*await asyncio.open_connection(sock=sock))


async def connect(endpoint: Endpoint) -> Uplink:
    """The channel over TLS to the driver.

    Raises:
        OSError: it cannot be reached, or is not who it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate is pinned: it is the only one accepted, whatever the address
    context.load_verify_locations(cadata=endpoint.certificate)
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(endpoint.host, endpoint.port, ssl=context), CONNECT_TIMEOUT
        )
    except asyncio.TimeoutError:
        raise TimeoutError(f"no answer from {endpoint.host}:{endpoint.port} within {CONNECT_TIMEOUT:.0f} s") from None
    writer.write(endpoint.token)
    return Uplink(reader, writer)
