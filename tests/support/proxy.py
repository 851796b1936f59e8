"""A wire between nodes and the driver that a test can cut, block and mend."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from typing import Any


class Proxy:
    """Forwards connections to an address. Use as a context manager."""

    def __init__(self, host: str, port: int) -> None:
        self.to = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._open = asyncio.Event()
        self.port = 0
        self.connections = 0
        #: How many connections have brought more than they may.
        self.stopped = 0
        self._most: int | None = None
        self._times = 0
        self._hang = False

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def block(self) -> None:
        """From now on nothing comes through, in either direction, and nobody is told: as when a cable is cut."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def stop_after(self, most: int, *, times: int = 1 << 30, hang: bool = False) -> None:
        """From now on, so many connections that bring the driver more bytes are reset, or go no further (``hang``)."""
        self._most, self._times, self._hang = most, times, hang

    def reset(self) -> None:
        """Ends the connections that are there as a firewall would, with RST; new ones are welcome."""
        self._call(self._reset())

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self) -> None:
        self._open.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await self._open.wait()
        try:
            there_reader, there_writer = await asyncio.open_connection(*self.to)
        except OSError:
            writer.close()
            return
        pair = (writer, there_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._copy(reader, there_writer, pair), self._copy(there_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._pairs.discard(pair)
            for side in pair:
                side.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bound: Any = None) -> None:
        brought = 0
        while data := await reader.read(1 << 16):
            await self._open.wait()
            brought += len(data)
            if bound is not None and self._most is not None and brought > self._most and self.stopped < self._times:
                self.stopped += 1
                if self._hang:
                    await writer.wait_closed()
                _reset(bound)
                return
            writer.write(data)
            await writer.drain()
        await self._open.wait()
        writer.close()

    async def _reset(self) -> None:
        for pair in list(self._pairs):
            _reset(pair)

    async def _close(self) -> None:
        self._server.close()
        await self._reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset(pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
    for writer in pair:
        sock = writer.get_extra_info("socket")
        with suppress(OSError):  # closed already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
