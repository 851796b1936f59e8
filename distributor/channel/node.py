"""The node's side of the channel, the connection to the driver. This module uses the standard library only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from distributor.channel import frames
from distributor.machine import network
from distributor.values import messages, outcome
from distributor.values.messages import Message
from distributor.values.plan import Endpoint

#: Seconds that one attempt to reach the driver may take. If the first attempt fails, the run goes on without the
#: channel.
CONNECT_TIMEOUT = 10.0

#: Seconds to wait for the driver to confirm that it has received all messages and output.
_BYE_TIMEOUT = 60.0

#: Seconds between attempts to reconnect after a break.
_REDIAL_INTERVAL = 0.2

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

#: Number of bytes that the driver has received, by rank and stream.
Offsets = dict[tuple[int, int], int]


def over_tls(endpoint: Endpoint) -> Dial:
    """Return a function that connects to the driver over TLS with the run's certificate and sends the run's token."""

    async def dial() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = network.pinned_tls(endpoint.certificate)
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
        writer.write(endpoint.token)
        return reader, writer

    return dial


def over_socket(sock: socket.socket) -> Dial:
    """Return a function that returns the streams to read and write ``sock``, which is already connected to the driver.

    In local mode, an agent inherits such a socket from the driver.
    """
    return lambda: asyncio.open_connection(sock=sock)


class Receiver(Protocol):
    """The methods of an agent that the channel calls. All of them must return at once."""

    def on_order(self, order: Message) -> None:
        """Obey an order from the driver."""

    def on_offsets(self, offsets: Offsets, again: bool) -> None:
        """Note how many bytes of each output stream of ranks the driver has.

        ``again`` means that a broken connection has been restored. In that case, send the output again from the
        positions in ``offsets``.
        """

    def on_driver_lost(self) -> None:
        """Note that the connection to the driver is broken and cannot be restored. This method is called once."""

    def status(self) -> messages.Beat:
        """Return the heartbeat to send to the driver now."""


@dataclass(frozen=True)
class Rhythm:
    """How often an agent and the driver must hear from each other.

    Attributes:
        timeout: number of seconds without a message after which the driver counts as lost, if ``redial`` is true.
        interval: number of seconds between heartbeats.
        redial: whether a broken connection can be restored. If it cannot, the driver counts as lost when the connection
            breaks.
    """

    timeout: float
    interval: float
    redial: bool


class Uplink:
    """An agent's end of the channel, the connection to the driver.

    With ``rhythm.redial``, a broken connection is restored, and the agent and the driver continue where they were.

    Args:
        dial: connects to the driver.
        hello: the first message of each connection; it says which node this is.
        receiver: gets the driver's orders.
        rhythm: how often the agent and the driver must hear from each other.
    """

    def __init__(self, dial: Dial, hello: messages.Hello, receiver: Receiver, rhythm: Rhythm) -> None:
        self._dial = dial
        self._told = [frames.pack(hello)]
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
        """Make the first connection to the driver.

        Raises:
            OSError: the driver cannot be reached, or does not have the expected certificate.
        """
        try:
            reader = await asyncio.wait_for(self._connect(), CONNECT_TIMEOUT)
        except TimeoutError:
            raise TimeoutError(f"the driver did not answer within {CONNECT_TIMEOUT:.0f} s") from None
        self._tasks = [asyncio.ensure_future(self._serve(reader)), asyncio.ensure_future(self._beat())]

    @property
    def is_up(self) -> bool:
        """Whether there is a connection to the driver on which the driver has answered."""
        return self._welcome.is_set() and not self._ended.is_set()

    @property
    def is_lost(self) -> bool:
        """Whether the connection to the driver has broken and cannot be restored."""
        return self._ended.is_set() and self._bye is None

    def tell(self, message: Message) -> None:
        """Send a message that must reach the driver, and send it again whenever a broken connection is restored.

        Raises:
            ProtocolError: the message is too long for a frame.
        """
        self._told.append(frames.pack(message))
        self._write(self._told[-1])

    def renew(self, hello: messages.Hello) -> None:
        """Use a new first message for later connections. Do not send the earlier messages of :meth:`tell` again."""
        self._told = [frames.pack(hello)]

    def send(self, message: Message) -> None:
        """Send a message once. If the connection breaks, the message is lost.

        Raises:
            ProtocolError: the message is too long for a frame.
        """
        self._write(frames.pack(message))

    async def send_log(self, log: outcome.Log) -> None:
        """Send a piece of a rank's output to the driver, and return once the driver is ready for more.

        While the connection is down, wait until it is restored or lost for good. If it is restored, the driver says how
        many bytes of the output have arrived. If bytes before this piece are missing, the piece is not sent, since the
        missing bytes must be sent again first.
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
        """Tell the driver that no more messages follow, and return its answer.

        Return ``None`` if the connection to the driver is lost, or if the driver does not confirm within
        :data:`_BYE_TIMEOUT` seconds that it has received everything.
        """
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
        self._heard = asyncio.get_running_loop().time()
        for message in self._told:
            self._writer.write(message)
        return reader

    def _write(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader | None) -> None:
        """Read the messages from the driver, over as many connections as needed."""
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
        if not isinstance(message, (messages.Welcome, messages.Heard, messages.Farewell)):
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
        """Reconnect to the driver; return ``None`` once the driver has been silent for too long."""
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
