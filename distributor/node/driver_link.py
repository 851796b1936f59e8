"""An agent's link to the driver, which sends nothing in a run without a channel."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from distributor.channel import frames
from distributor.channel.node import Dial, Receiver, Rhythm, Uplink, over_socket, over_tls
from distributor.errors import StartError
from distributor.node.tailing import Tailing
from distributor.values import messages
from distributor.values.job import Job
from distributor.values.placement import Placement, Share
from distributor.values.plan import AgentOrder, Endpoint

_BEAT_INTERVAL = 5.0  # seconds at most; several heartbeats must fit into each time-out

_ORPHAN_PATIENCE = 3.0  # seconds that an agent without owner waits for the driver, which may be gone too

T = TypeVar("T")


class DriverLink:
    """An agent's link to the driver. In local mode, it has a socket that is connected already."""

    def __init__(self, order: AgentOrder, job: Job, sock: socket.socket | None, receiver: Receiver) -> None:
        self._order = order
        self._job = job
        self._socket = sock
        self._receiver = receiver
        self.nodes = 0  # of the run; 0 until :meth:`open`
        self._uplink: Uplink | None = None
        self._orphaned = asyncio.Event()
        self._lives = False  # the ranks have succeeded, or are about to

    @property
    def is_private(self) -> bool:
        """Whether the channel is a socket inherited from the driver's process."""
        return self._socket is not None

    async def open(self, placement: Share) -> str | None:
        """Connect to the driver, or return a warning, after which the run goes on without a channel.

        StartError if the driver was reached earlier and refuses the connection now: the run has ended.
        """
        self.nodes = placement.count
        found = self._dial()
        if found is None:
            return None
        dial, at = found
        text = "" if self._order.placed else Placement(placement.nodes).text()
        hello = messages.Hello(self._order.executor, placement.digest, text, self._order.secret)
        uplink = self._make_uplink(dial, hello)
        try:
            await uplink.open()
        except OSError as error:
            if self._order.reached and isinstance(error, ConnectionRefusedError):
                raise StartError(f"the driver does not listen at {at} any more, so the run has ended") from None
            return (
                f"{frames.UNREACHED} at {at} ({error}), so its log lines are not shown live. Results and errors still "
                "arrive"
            )
        self._uplink = uplink
        return None

    async def fail(self, placement: Share | None, attempt: int) -> None:
        """Tell the driver that this node has failed. Connect first if need be: other nodes may wait for this one."""
        if not self.nodes and placement is not None:
            with suppress(StartError, frames.ProtocolError):
                await self.open(placement)
        self.tell(messages.Failed(attempt=attempt))

    def _dial(self) -> tuple[Dial, str] | None:
        """Return how to connect, and the address as text; ``None`` if there is no channel."""
        if self._socket is not None:
            return over_socket(self._socket), "its socket"
        if self._order.endpoint is None:
            return None
        endpoint = Endpoint(*self._order.endpoint)
        return over_tls(endpoint), f"{endpoint.host}:{endpoint.port}"

    def _make_uplink(self, dial: Dial, hello: messages.Hello) -> Uplink:
        interval = min(_BEAT_INTERVAL, self._job.deadlines.heartbeat_timeout / 6)
        if self._job.deadlines.stall_timeout is not None:
            interval = min(interval, self._job.deadlines.stall_timeout / 4)
        rhythm = Rhythm(self._job.deadlines.heartbeat_timeout, interval, redial=not self.is_private)
        return Uplink(dial, hello, self._receiver, rhythm)

    def carry(self, logs: Tailing) -> None:
        if self._uplink is not None:
            logs.ship_to(self._uplink)

    @property
    def is_open(self) -> bool:
        """Whether messages reach the driver, now or once a broken connection is restored."""
        return self._uplink is not None and not self._uplink.is_lost

    @property
    def is_cut(self) -> bool:
        """Whether the connection has broken for good."""
        return self._uplink is not None and self._uplink.is_lost

    def tell(self, message: messages.Message, *shorter: messages.Message) -> None:
        """Send a message that must arrive, again after each break.

        If it is too long for the channel, try the ``shorter`` ones in order; if all are too long, send nothing.
        """
        if self._uplink is None:
            return
        for each in (message, *shorter):
            with suppress(frames.ProtocolError):
                self._uplink.tell(each)
                return

    def renew(self) -> None:
        """Begin another attempt: messages about the last one are not sent again."""
        if self._uplink is not None:
            self._uplink.renew()

    def tell_importing(self, module: str) -> None:
        """Tell the driver which module this node is importing; ``""`` once it has finished."""
        self.tell(messages.Importing(self._order.executor, self.nodes, module))

    def warn(self, host: str, texts: list[str]) -> None:
        if texts:
            self.tell(messages.Warnings(host, tuple(texts)))

    def send(self, message: messages.Message) -> None:
        """Send a message that may get lost."""
        if self._uplink is not None:
            self._uplink.send(message)

    def orphan(self, *, lives: bool) -> None:
        """Tell the driver that the owner is gone.

        The node counts as lost unless it ``lives``: its ranks have succeeded, or are about to.
        """
        self._lives = lives
        self.tell(messages.Orphaned(lives))
        self._orphaned.set()

    @property
    def is_orphaned(self) -> bool:
        return self._orphaned.is_set()

    async def close(self) -> bool:
        """Close the channel, and return whether the driver has answered that it stopped the run."""
        if self._uplink is None:
            return False
        bye = await self.unless_orphaned(self._uplink.close())
        return bye is not None and bye.failed

    async def unless_orphaned(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of work that needs the driver, or ``None`` if it is given up.

        Once the owner is gone, the driver may be gone too, so the work gets :data:`_ORPHAN_PATIENCE` seconds. If the
        ranks have succeeded, it goes on while the channel is up: without the owner, results have no other way.
        """
        working, orphaned = asyncio.ensure_future(work), asyncio.ensure_future(self._orphaned.wait())
        await asyncio.wait({working, orphaned}, return_when=asyncio.FIRST_COMPLETED)
        orphaned.cancel()
        while not working.done():
            done, _ = await asyncio.wait({working}, timeout=_ORPHAN_PATIENCE)
            if not done and not (self._lives and self._uplink is not None and self._uplink.is_up):
                working.cancel()
                return None
        return working.result()
