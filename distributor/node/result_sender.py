"""Sends the results of a successful node to the driver without Spark.

The owner sends them through Spark, but it or its executor may die before, and the agent outlives both. So the agent
sends the report and small values over the channel, and each large value over a connection of its own. Of large values
that have arrived, the owner then sends only size and digest.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Mapping
from dataclasses import replace

from distributor.channel import requests as exchange
from distributor.node.driver_link import DriverLink
from distributor.values import messages
from distributor.values.messages import Finished, Sent
from distributor.values.outcome import NodeReport
from distributor.values.plan import AgentOrder

_INLINE = 5 << 19  # bytes of return values in the node's final message


class ResultSender:
    """Sends the driver what a node's ranks have returned; ``silence`` is seconds without progress."""

    def __init__(self, order: AgentOrder, link: DriverLink, silence: float) -> None:
        self._order = order
        self._link = link
        self._silence = silence
        self._following: tuple[int, ...] = ()

    def announce(self, report: NodeReport, values: Mapping[int, bytes | str]) -> None:
        """Send the node's report, and the values that fit into the same message.

        Send nothing without a network connection to the driver, as in local mode. A ``str`` is the path of a value's
        file.
        """
        if self._order.endpoint is None or not self._link.is_open:
            return
        small = within(values, _INLINE)
        self._following = tuple(rank for rank in values if rank not in small)
        texts = tuple((rank, base64.b64encode(value).decode()) for rank, value in small.items())
        self._link.tell(Finished(replace(report, placement=None), texts, self._following))

    async def send(self, values: Mapping[int, bytes | str]) -> tuple[dict[int, bytes | str | Sent], bool]:
        """Send the values that :meth:`announce` has left out.

        Return what the owner must send, with size and digest in place of values that have arrived, and whether the run
        was stopped. In a stopped run nobody waits for values, so none are left.
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
    """Return the values that fit into ``most`` bytes together, without files.

    >>> within({0: b"abc", 1: "/tmp/value", 2: b"d", 3: b"e"}, 4)
    {0: b'abc', 2: b'd'}
    """
    kept: dict[int, bytes] = {}
    for rank, value in values.items():
        if isinstance(value, bytes) and len(value) <= most:
            kept[rank] = value
            most -= len(value)
    return kept
