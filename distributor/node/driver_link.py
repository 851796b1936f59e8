"""An agent's link to the driver over the channel (a connection for messages and log lines).

A run may have no channel. In that case, the link sends nothing.
"""

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
from distributor.values.placement import Node
from distributor.values.plan import AgentOrder, Endpoint

#: Maximum number of seconds between heartbeats. Several heartbeats must fit into each time-out that depends on them.
_BEAT_INTERVAL = 5.0

#: Number of seconds that an agent whose owner (the process that started it) is gone waits for the driver, which may be
#: gone too.
_ORPHAN_PATIENCE = 3.0

T = TypeVar("T")


class DriverLink:
    """The link of an agent to the driver. If the run has no channel (connection), the link drops all messages.

    Args:
        order: the agent's order from its owner (the process that started the agent). It gives the driver's address.
        job: the job, for its time-outs.
        sock: in local mode, a socket that is connected to the driver.
        receiver: gets the driver's orders.
    """

    def __init__(self, order: AgentOrder, job: Job, sock: socket.socket | None, receiver: Receiver) -> None:
        self._order = order
        self._job = job
        self._socket = sock
        self._receiver = receiver
        self._nodes: tuple[Node, ...] = ()
        self._uplink: Uplink | None = None
        self._orphaned = asyncio.Event()
        self._lives = False

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the run; empty until :meth:`open` is called."""
        return self._nodes

    @property
    def is_private(self) -> bool:
        """Whether the channel to the driver is a socket that the agent has inherited from the driver's process."""
        return self._socket is not None

    async def open(self, nodes: tuple[Node, ...]) -> str | None:
        """Connect to the driver. Return a warning if that fails. In that case, the run goes on without this connection.

        Args:
            nodes: all nodes of the run, with their ranks.

        Raises:
            StartError: the driver was reached earlier in this run and now refuses the connection. This means that the
                run has ended.
        """
        self._nodes = nodes
        found = self._dial()
        if found is None:
            return None
        dial, at = found
        uplink = self._make_uplink(dial)
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

    def _dial(self) -> tuple[Dial, str] | None:
        """Return a function that connects to the driver, and the address as text; ``None`` if there is no channel."""
        if self._socket is not None:
            return over_socket(self._socket), "its socket"
        if self._order.endpoint is None:
            return None
        endpoint = Endpoint(*self._order.endpoint)
        return over_tls(endpoint), f"{endpoint.host}:{endpoint.port}"

    def _make_uplink(self, dial: Dial) -> Uplink:
        interval = min(_BEAT_INTERVAL, self._job.deadlines.heartbeat_timeout / 6)
        if self._job.deadlines.stall_timeout is not None:
            interval = min(interval, self._job.deadlines.stall_timeout / 4)
        rhythm = Rhythm(self._job.deadlines.heartbeat_timeout, interval, redial=not self.is_private)
        return Uplink(dial, self._hello(), self._receiver, rhythm)

    def _hello(self) -> messages.Hello:
        return messages.Hello(self._order.executor, self._nodes, self._order.secret)

    def carry(self, logs: Tailing) -> None:
        """Send the ranks' output to the driver from now on."""
        if self._uplink is not None:
            logs.ship_to(self._uplink)

    @property
    def is_open(self) -> bool:
        """Whether messages reach the driver, now or once a broken connection is restored."""
        return self._uplink is not None and not self._uplink.is_lost

    def tell(self, message: messages.Message, *shorter: messages.Message) -> None:
        """Send a message that must reach the driver, and send it again whenever a broken connection is restored.

        Args:
            message: the message.
            *shorter: shorter versions, to try in order if the message is too long for the channel. If all versions are
                too long, nothing is sent.
        """
        if self._uplink is None:
            return
        for each in (message, *shorter):
            with suppress(frames.ProtocolError):
                self._uplink.tell(each)
                return

    def renew(self, nodes: tuple[Node, ...]) -> None:
        """Begin another attempt. Messages about the previous attempt are not sent to the driver again.

        Args:
            nodes: the nodes of the run. Node 0 has a new port, at which the ranks meet.
        """
        self._nodes = nodes
        if self._uplink is not None:
            self._uplink.renew(self._hello())

    def tell_importing(self, module: str) -> None:
        """Tell the driver which module this node is importing; ``""`` once the import has finished."""
        self.tell(messages.Importing(self._order.executor, len(self._nodes), module))

    def warn(self, host: str, texts: list[str]) -> None:
        """Send warnings about the node on ``host`` to the driver. Do nothing if ``texts`` is empty."""
        if texts:
            self.tell(messages.Warnings(host, tuple(texts)))

    def send(self, message: messages.Message) -> None:
        """Send the driver a message once; the message may get lost."""
        if self._uplink is not None:
            self._uplink.send(message)

    def orphan(self, *, lives: bool) -> None:
        """Record that the agent's owner (the process that started the agent) is gone, and tell the driver.

        Args:
            lives: whether the node's ranks have succeeded, or are about to. If not, the driver counts the node as lost.
        """
        self._lives = lives
        self.tell(messages.Orphaned(lives))
        self._orphaned.set()

    @property
    def is_orphaned(self) -> bool:
        """Whether the agent's owner (the process that started the agent) is gone."""
        return self._orphaned.is_set()

    async def close(self) -> bool:
        """Close the channel to the driver. Return whether the driver has answered that it stopped the run."""
        if self._uplink is None:
            return False
        bye = await self.unless_orphaned(self._uplink.close())
        return bye is not None and bye.failed

    async def unless_orphaned(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Wait for ``work``, which needs the driver, and return the result of ``work``.

        Once the agent's owner (the process that started the agent) is gone, the driver may be gone too. From then on,
        wait for :data:`_ORPHAN_PATIENCE` seconds, then give up the work and return ``None``, unless the ranks have
        succeeded.

        If the ranks have succeeded, do not give up while the channel is up. The owner would have sent the results
        through Spark. Without the owner, the results can reach the driver only over the channel.
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
