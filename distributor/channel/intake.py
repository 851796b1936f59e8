"""Receive, on the driver, the return values that agents send over separate connections.

To send a rank's return value, an agent must show the secret of the rank's node. Ranks do not know this secret. Unless
the Spark job fails or an agent dies, the driver compares the value's digest with the digest that arrives through Spark,
and only then unpickles the value.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import mmap
import sys
from collections.abc import Collection
from dataclasses import dataclass, field

from distributor.channel import frames
from distributor.machine import limits
from distributor.values.messages import Proceed, Received, Value

#: Minimum number of bytes that are hashed at a time, except at the end of a value.
_STEP = 1 << 20

#: Memory is requested from the system in pieces of this number of bytes, shortly before data arrives for it.
_READY = 16 << 20

#: MADV_POPULATE_WRITE of madvise(2), which makes Linux 5.14 and later provide memory at once. Older systems refuse the
#: call, and provide memory as it is used.
_POPULATE = 23

#: Size of the buffer for bytes after the end of a value, which are dropped.
_EXCESS = 64 << 10


@dataclass(frozen=True)
class Arrived:
    """The bytes of a rank's pickled return value, and their digest (sha256)."""

    data: memoryview = field(repr=False)
    digest: bytes


class Intake:
    """The return values of a run that have arrived or are arriving over the channel, at most one for each rank.

    All methods except ``coming``, ``expect`` and ``get`` are called in the thread that serves the channel.

    Args:
        limit: maximum total size of all return values, in bytes. The default is half of this machine's memory, since
            unpickling makes a copy. A value that would make the total exceed the limit is refused, and its node sends
            the value through Spark.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limits.total_memory() // 2 if limit is None else limit
        self._ranks: Collection[int] = ()
        self._coming: dict[int, _Delivery] = {}
        self._arrived: dict[int, Arrived] = {}

    @property
    def coming(self) -> set[int]:
        """The ranks whose return values are arriving, but are not complete yet."""
        return set(self._coming)

    @property
    def received(self) -> int:
        """Number of bytes of return values that have arrived, including those of incomplete values."""
        coming = (delivery.filled for delivery in self._coming.values())
        return sum(coming) + sum(len(arrived.data) for arrived in self._arrived.values())

    def has(self, rank: int) -> bool:
        """Return whether the return value of a rank has arrived, or is not expected (see :meth:`expect`)."""
        return rank in self._arrived or rank not in self._ranks

    def expect(self, ranks: Collection[int]) -> None:
        """Set the ranks whose return values are expected. The return values of other ranks are refused."""
        self._ranks = ranks

    def get(self, rank: int) -> Arrived | None:
        """Return the return value of a rank; ``None`` if it has not arrived."""
        return self._arrived.get(rank)

    def clear(self) -> None:
        """Forget the return values that have arrived."""
        self._arrived.clear()

    async def receive(self, value: Value, writer: asyncio.StreamWriter) -> None:
        """Receive a return value over the connection on which it was announced. Drop an earlier value of the same rank.

        If the value is not expected or is too large, send no answer. The caller then ends the connection.

        Raises:
            ConnectionError: the connection ended before all bytes of the value had arrived.
            OSError: the operating system refuses to map memory for the value.
        """
        before = self._coming.pop(value.rank, None)
        if before is not None:
            before.abort()
        self._arrived.pop(value.rank, None)
        if value.rank not in self._ranks or not 0 < value.size <= self._limit - self._held():
            return
        delivery = self._coming[value.rank] = _Delivery(value.size, writer.transport)
        try:
            writer.transport.set_protocol(delivery)
            writer.write(frames.pack(Proceed()))
            digest = await delivery.digest()
            if self._coming.get(value.rank) is delivery:
                self._arrived[value.rank] = Arrived(delivery.data, digest)
                writer.write(frames.pack(Received()))
        finally:
            if self._coming.get(value.rank) is delivery:
                del self._coming[value.rank]

    def abort(self) -> None:
        """End every connection over which a rank's return value is arriving."""
        for delivery in self._coming.values():
            delivery.abort()

    def _held(self) -> int:
        coming = (len(delivery.data) for delivery in self._coming.values())
        return sum(coming) + sum(len(arrived.data) for arrived in self._arrived.values())


class _Delivery(asyncio.BufferedProtocol):
    """The bytes of one return value. The connection writes them into ``data``, and counts them in ``filled``.

    Args:
        size: number of bytes of the value. Memory is taken up only as the bytes arrive.
        transport: the connection over which the value arrives.

    Raises:
        OSError: the operating system refuses to map ``size`` bytes of memory.
    """

    def __init__(self, size: int, transport: asyncio.WriteTransport) -> None:
        self.data = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        self._ready = 0
        self.filled = 0
        self._lost = False
        self._transport = transport
        self._news = asyncio.Event()
        self._excess = memoryview(bytearray(_EXCESS))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.data[self.filled :] or self._excess

    def buffer_updated(self, nbytes: int) -> None:
        self.filled = min(self.filled + nbytes, len(self.data))
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._news.set()

    def abort(self) -> None:
        self._transport.abort()

    async def digest(self) -> bytes:
        """Return the digest of the value once all bytes have arrived. Another thread hashes the bytes as they arrive.

        Raises:
            ConnectionError: the connection ended before all bytes had arrived.
        """
        found = hashlib.sha256()
        done = 0
        while done < len(self.data):
            await self._news.wait()
            self._news.clear()
            end = self.filled
            if end == len(self.data) or end - done >= _STEP:
                await asyncio.get_running_loop().run_in_executor(None, self._hash, found, done, end)
                done = end
            if self._lost and self.filled < len(self.data):
                raise ConnectionError("the connection ended before all bytes of a rank's return value had arrived")
        return found.digest()

    def _hash(self, found: hashlib._Hash, start: int, end: int) -> None:
        """Hash the value's bytes from ``start`` to ``end``, which have arrived. First, allocate memory for later bytes.

        The kernel allocates memory for later bytes in madvise(2). Both madvise(2) and the hash function release the
        GIL, so the channel's thread can receive more bytes meanwhile.
        """
        if sys.platform == "linux" and self._ready < min(end + _READY // 2, len(self.data)):
            length = min(_READY, len(self.data) - self._ready)
            where = ctypes.c_void_p(self._address + self._ready)
            ctypes.CDLL(None).madvise(where, ctypes.c_size_t(length), _POPULATE)
            self._ready += length
        found.update(self.data[start:end])
