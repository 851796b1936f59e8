"""The node's side of the channel. Standard library only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from distributor.channel import frames
from distributor.machine import network
from distributor.values import messages, outcome
from distributor.values.messages import Message
from distributor.values.plan import Endpoint

#: Seconds of one attempt to reach the driver. If the first attempt fails, the run goes on without the channel.
CONNECT_TIMEOUT = 10.0

_BYE_TIMEOUT = 60.0  # seconds for the driver to confirm that it has all messages and output

_REDIAL_INTERVAL = 0.2  # seconds between attempts to reconnect

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

Offsets = dict[tuple[int, int], int]  # bytes that the driver has received, by rank and stream


def over_tls(endpoint: Endpoint) -> Dial:
    """Connect over TLS with the run's certificate and token."""

    async def dial() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = network.pinned_tls(endpoint.certificate)
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
        writer.write(endpoint.token)
        return reader, writer

    return dial


def over_socket(sock: socket.socket) -> Dial:
    """Use a socket that is connected to the driver already: in local mode, the agent inherits it."""
    return lambda: asyncio.open_connection(sock=sock)


class Receiver(Protocol):
    """What the channel calls of an agent. All methods must return at once."""

    def on_order(self, order: Message) -> None:
        """Obey an order of the driver."""

    def on_offsets(self, offsets: Offsets, again: bool) -> None:
        """Note how much output the driver has; after a break (``again``), send output again from there."""

    def on_driver_lost(self) -> None:
        """Note, once, that the connection cannot be restored."""

    def status(self) -> messages.Beat:
        """Return the heartbeat to send now."""


@dataclass(frozen=True)
class Rhythm:
    """How often an agent and the driver must hear from each other, in seconds.

    Without ``redial``, a break of the connection means at once that the driver is lost; ``timeout`` is not used.
    """

    timeout: float
    interval: float
    redial: bool


def _aged(message: Message, seconds: float) -> Message:
    """Return a message as a node sends it so many seconds later."""
    return replace(message, age=message.age + seconds) if isinstance(message, messages.Failed) else message


class Uplink:
    """An agent's end of the channel.

    With ``rhythm.redial``, a broken connection is restored, and the agent and the driver continue where they were.
    """

    def __init__(self, dial: Dial, hello: messages.Hello, receiver: Receiver, rhythm: Rhythm) -> None:
        self._dial = dial
        self._told: list[tuple[Message, float]] = [(hello, 0.0)]  # and when they were told
        self._receiver = receiver
        self._rhythm = rhythm
        self._writer: asyncio.StreamWriter | None = None
        self._heard = 0.0
        self._welcome = asyncio.Event()
        self._ended = asyncio.Event()
        self._bye: messages.Farewell | None = None
        self._breaks = 0
        self._has: Offsets = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Make the first connection; OSError if the driver cannot be reached or has another certificate."""
        try:
            reader = await asyncio.wait_for(self._connect(), CONNECT_TIMEOUT)
        except TimeoutError:
            raise TimeoutError(f"the driver did not answer within {CONNECT_TIMEOUT:.0f} s") from None
        self._tasks = [asyncio.ensure_future(self._serve(reader)), asyncio.ensure_future(self._beat())]

    @property
    def is_up(self) -> bool:
        """Whether the driver has answered on the present connection."""
        return self._welcome.is_set() and not self._ended.is_set()

    @property
    def is_lost(self) -> bool:
        """Whether the connection has broken for good."""
        return self._ended.is_set() and self._bye is None

    def tell(self, message: Message) -> None:
        """Send a message that must arrive: again after each break. ProtocolError if it is too long for a frame."""
        self._write(frames.pack(message))
        self._told.append((message, asyncio.get_running_loop().time()))

    def renew(self) -> None:
        """Forget the messages of :meth:`tell`."""
        del self._told[1:]

    def send(self, message: Message) -> None:
        """Send a message that a break may lose. ProtocolError if it is too long for a frame."""
        self._write(frames.pack(message))

    async def send_log(self, log: outcome.Log) -> None:
        """Send a piece of output, and return once the driver is ready for more.

        While the connection is down, wait. If bytes before this piece are missing then, they go first, and it is not
        sent.
        """
        if not self._welcome.is_set():
            await self._welcome.wait()
            if self._breaks and log.offset > self._has.get((log.rank, log.stream), 0):
                return
        self._write(frames.pack_log(log))
        if self._writer is not None:
            with suppress(OSError):
                await self._writer.drain()

    async def close(self) -> messages.Farewell | None:
        """Say good-bye, and return the driver's answer; ``None`` if it does not confirm that it has everything."""
        if not self._ended.is_set():
            self.tell(messages.Bye())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _BYE_TIMEOUT)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        return self._bye

    async def _connect(self) -> asyncio.StreamReader:
        reader, self._writer = await self._dial()
        self._heard = now = asyncio.get_running_loop().time()
        for message, since in self._told:
            self._writer.write(frames.pack(_aged(message, now - since)))
        return reader

    def _write(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader | None) -> None:
        """Read the driver's messages, over as many connections as needed."""
        while reader is not None:
            with suppress(OSError, frames.ProtocolError, KeyError, TypeError, ValueError):
                while self._bye is None and isinstance(message := await frames.read(reader), Message):
                    self._heard = asyncio.get_running_loop().time()
                    self._obey(message)
            refused = not self._welcome.is_set()
            self._welcome.clear()
            if self._writer is not None:
                self._writer.close()
            if refused and self._rhythm.redial:
                await asyncio.sleep(_REDIAL_INTERVAL)
            reader = await self._come_back() if self._rhythm.redial and self._bye is None else None
        self._ended.set()
        self._welcome.set()  # lets waiting calls of send_log end
        self._writer = None
        if self._bye is None:
            self._receiver.on_driver_lost()

    def _obey(self, message: Message) -> None:
        if not isinstance(message, (messages.Welcome, messages.BeatHeard, messages.Farewell)):
            self._receiver.on_order(message)
            return
        self._has = offsets = {(rank, stream): offset for rank, stream, offset in message.offsets}
        self._receiver.on_offsets(offsets, isinstance(message, messages.Welcome) and self._breaks > 0)
        if isinstance(message, messages.Welcome):
            self._welcome.set()
        elif isinstance(message, messages.Farewell):
            self._bye = message
            self._ended.set()

    async def _come_back(self) -> asyncio.StreamReader | None:
        """Reconnect; ``None`` once the driver has been silent for too long."""
        loop = asyncio.get_running_loop()
        self._breaks += 1
        while (left := self._heard + self._rhythm.timeout - loop.time()) > 0:
            heard = self._heard
            try:
                return await asyncio.wait_for(self._connect(), min(left, CONNECT_TIMEOUT))
            except OSError:
                self._heard = heard
                await asyncio.sleep(min(left, _REDIAL_INTERVAL))
        return None

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._rhythm.interval)
            self.send(self._receiver.status())
            if self._rhythm.redial and self._writer is not None and loop.time() - self._heard > self._rhythm.timeout:
                self._writer.transport.abort()  # treat the connection as broken, to end pending calls
