"""Send the results of a successful node to the driver without Spark, over connections to the driver.

The agent's owner (the Python worker of a Spark task) sends results through Spark. The worker or its executor may die
before the results are sent, but the agent outlives both. If the driver can be reached, the agent therefore sends the
results itself: the report and small return values over the channel (its main connection to the driver), and each large
value over a separate connection. The owner sends them all through Spark too, except large values that the driver has
received: of these, it sends only the size and the digest.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Mapping
from dataclasses import replace

from distributor.channel import task as exchange
from distributor.node.driver_link import DriverLink
from distributor.values import messages
from distributor.values.messages import Finished, Sent
from distributor.values.outcome import NodeReport
from distributor.values.plan import AgentOrder

#: Maximum number of bytes of return values in the message that says that a node has finished. Further values are sent
#: over separate connections.
_INLINE = 5 << 19


class Handover:
    """Sends to the driver what a node's ranks have returned.

    Args:
        order: the order that the agent got from its owner (the process that started the agent).
        link: the agent's link to the driver.
        silence: number of seconds without progress after which the driver counts as lost.
    """

    def __init__(self, order: AgentOrder, link: DriverLink, silence: float) -> None:
        self._order = order
        self._link = link
        self._silence = silence
        self._following: tuple[int, ...] = ()

    def announce(self, report: NodeReport, values: Mapping[int, bytes | str]) -> None:
        """Send the driver the node's report, and the return values that fit into the same message.

        Do nothing if there is no network connection to the driver, for example in local mode.

        Args:
            report: the node's report.
            values: pickled return values by rank, or the paths of files that hold them.
        """
        if self._order.endpoint is None or not self._link.is_open:
            return
        small = within(values, _INLINE)
        self._following = tuple(rank for rank in values if rank not in small)
        texts = tuple((rank, base64.b64encode(value).decode()) for rank, value in small.items())
        self._link.tell(Finished(replace(report, placement=None), texts, self._following))

    async def send(self, values: Mapping[int, bytes | str]) -> tuple[dict[int, bytes | str | Sent], bool]:
        """Send the return values that :meth:`announce` has left out because of their size.

        Returns:
            All values, and whether the run has been stopped. A value that was sent is replaced by a :class:`Sent` (its
            size and digest). If the run has been stopped, the values are left out, since no process waits for them.
        """
        left: dict[int, bytes | str | Sent] = dict(values)
        loop = asyncio.get_running_loop()
        for rank in self._following:
            try:
                left[rank] = await loop.run_in_executor(None, self._send, rank, values[rank])
            except exchange.StoppedError:
                return {}, True
            except (OSError, ValueError):  # ValueError: the answer is not a valid message
                if self._link.is_orphaned:
                    break  # no owner is left to send the value through Spark
                # Otherwise, the owner sends the value through Spark.
        return left, False

    def _send(self, rank: int, content: bytes | str) -> Sent:
        assert self._order.endpoint is not None
        size = len(content) if isinstance(content, bytes) else os.path.getsize(content)
        value = messages.Value(rank, size, self._order.executor, self._order.secret)
        return exchange.send_value(self._order.endpoint, value, content, self._silence)


def within(values: Mapping[int, bytes | str], most: int) -> dict[int, bytes]:
    """Return the values that fit into ``most`` bytes in total, in the order of ``values``.

    Leave out each value that would make the total exceed ``most`` bytes, and each value that is in a file. For such a
    value, ``values`` contains the file's path (a ``str``).

    >>> within({0: b"abc", 1: "/tmp/value", 2: b"d", 3: b"e"}, 4)
    {0: b'abc', 2: b'd'}
    """
    kept: dict[int, bytes] = {}
    for rank, value in values.items():
        if isinstance(value, bytes) and len(value) <= most:
            kept[rank] = value
            most -= len(value)
    return kept
