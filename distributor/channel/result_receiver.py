"""Receives, on the driver, return values that agents send over connections of their own.

A value comes with the secret of the rank's node, which ranks do not know. Unless the Spark job fails or an agent dies,
the driver unpickles a value only if its digest is the one that arrives through Spark.
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

_STEP = 1 << 20  # bytes hashed at a time, at least

_READY = 16 << 20  # bytes of memory requested at a time, shortly before data arrives

#: MADV_POPULATE_WRITE of madvise(2): Linux 5.14 and later provide memory at once, older ones refuse, and do so on use.
_POPULATE = 23

_EXCESS = 64 << 10  # buffer for bytes after the end of a value, which are dropped


@dataclass(frozen=True)
class Arrived:
    """A rank's pickled return value, and its sha256."""

    data: memoryview = field(repr=False)
    digest: bytes


class ResultReceiver:
    """The return values of a run, at most one for each rank.

    Other threads may use ``coming``, ``expect`` and ``get`` only. All values together have at most ``limit`` bytes, by
    default half of this machine's memory, since unpickling makes a copy. A refused value goes through Spark.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limits.total_memory() // 2 if limit is None else limit
        self._ranks: Collection[int] = ()
        self._coming: dict[int, _Delivery] = {}
        self._arrived: dict[int, Arrived] = {}

    @property
    def coming(self) -> set[int]:
        """The ranks of incomplete values."""
        return set(self._coming)

    @property
    def received(self) -> int:
        """Bytes that have arrived, also of incomplete values."""
        coming = (delivery.filled for delivery in self._coming.values())
        return sum(coming) + sum(len(arrived.data) for arrived in self._arrived.values())

    def has(self, rank: int) -> bool:
        """Whether the value of a rank has arrived or is not expected."""
        return rank in self._arrived or rank not in self._ranks

    def expect(self, ranks: Collection[int]) -> None:
        self._ranks = ranks

    def get(self, rank: int) -> Arrived | None:
        return self._arrived.get(rank)

    def clear(self) -> None:
        self._arrived.clear()

    async def receive(self, value: Value, writer: asyncio.StreamWriter) -> None:
        """Receive a return value in place of an earlier one of the rank; a refused one gets no answer.

        ConnectionError if the connection ends before all bytes have arrived, OSError if no memory can be mapped.
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
        for delivery in self._coming.values():
            delivery.abort()

    def _held(self) -> int:
        coming = (len(delivery.data) for delivery in self._coming.values())
        return sum(coming) + sum(len(arrived.data) for arrived in self._arrived.values())


class _Delivery(asyncio.BufferedProtocol):
    """The bytes of one return value, as they arrive; memory is taken up only then. OSError if it cannot be mapped."""

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
        """Return the digest once all bytes are there; another thread hashes them as they arrive.

        ConnectionError if the connection ends before.
        """
        hasher = hashlib.sha256()
        done = 0
        while done < len(self.data):
            await self._news.wait()
            self._news.clear()
            end = self.filled
            if end == len(self.data) or end - done >= _STEP:
                await asyncio.get_running_loop().run_in_executor(None, self._hash, hasher, done, end)
                done = end
            if self._lost and self.filled < len(self.data):
                raise ConnectionError("the connection ended before all bytes of a rank's return value had arrived")
        return hasher.digest()

    def _hash(self, hasher: hashlib._Hash, start: int, end: int) -> None:
        """Hash bytes that have arrived, and let the kernel allocate memory for later ones.

        madvise(2) and the hash release the GIL, so the channel's thread receives meanwhile.
        """
        if sys.platform == "linux" and self._ready < min(end + _READY // 2, len(self.data)):
            length = min(_READY, len(self.data) - self._ready)
            where = ctypes.c_void_p(self._address + self._ready)
            ctypes.CDLL(None).madvise(where, ctypes.c_size_t(length), _POPULATE)
            self._ready += length
        hasher.update(self.data[start:end])
