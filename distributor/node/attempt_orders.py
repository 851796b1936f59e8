"""Keeps the driver's orders about further attempts, which may arrive before the agent waits for them."""

from __future__ import annotations

import asyncio

from distributor.values import messages


class AttemptOrders:
    """The driver's orders about further attempts. ``most`` is a number of restarts, ``attempt`` the first one here."""

    def __init__(self, most: int, attempt: int = 0) -> None:
        self._most = most
        self._attempt = attempt
        self._begin: messages.Begin | None = None
        self._stop: messages.Stop | None = None
        self._over = attempt >= most
        self._changed = asyncio.Event()

    @property
    def possible(self) -> bool:
        """Whether there may be another attempt."""
        return not self._over

    @property
    def spare(self) -> bool:
        """Whether the current attempt keeps a spare."""
        return not self._over and self._attempt < self._most

    @property
    def ordered(self) -> int:
        """The last attempt that the driver has ordered."""
        return self._attempt if self._begin is None else self._begin.attempt

    def end(self) -> None:
        self._over = True
        self._changed.set()

    def on_order(self, order: messages.Message) -> bool:
        """Record an order if it is about the next attempt; return whether it is."""
        if isinstance(order, messages.End):
            self.end()
        elif isinstance(order, messages.Begin):
            if order.attempt > self._attempt:  # otherwise an old order, sent again on a new connection
                self._begin = order
                self._changed.set()
        elif isinstance(order, messages.Stop) and self._begin is not None:
            if self._stop is None or self._stop.grace:
                self._stop = order
        else:
            return False
        return True

    async def wait(self) -> messages.Begin | None:
        """Return the order to begin another attempt; ``None`` if none follows."""
        await self._changed.wait()
        return None if self._over else self._begin

    def begun(self) -> messages.Stop | None:
        """Make the ordered attempt the current one, and return the order to stop it, if one has arrived."""
        assert self._begin is not None
        stop, self._attempt = self._stop, self._begin.attempt
        self._begin = self._stop = None
        self._changed.clear()
        return stop
