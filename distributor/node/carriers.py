"""Ways, called *carriers*, to copy ranks' new files from a node to ``output_dir``. All methods block."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from distributor.channel import requests as exchange
from distributor.channel.requests import RequestRefusedError
from distributor.machine.storage import Folder, is_url
from distributor.node.driver_link import DriverLink
from distributor.node.url_writer import UrlWriter
from distributor.shipping import tree
from distributor.values.files import Entry, beyond_limit, incoming, own
from distributor.values.job import Job
from distributor.values.messages import Delete, Upload
from distributor.values.plan import AgentOrder


class ChangedError(OSError):
    """A file changed while it was being copied."""


#: Seconds that the driver has to answer, at least: it may have to give an uploaded file its final name.
_MOVING = 300.0


class Carrier(Protocol):
    """Copies new files of ranks to ``output_dir``."""

    @property
    def uploads(self) -> UrlWriter | None:
        """What writes to the URL, if ``output_dir`` is one."""

    @property
    def is_live(self) -> bool:
        """Whether files can be copied now, during the run."""

    @property
    def through_spark(self) -> bool:
        """Whether the Spark task may send files that could not be copied."""

    def carry(self, entry: Entry, source: str, unchanged: Callable[[], bool]) -> str | None:
        """Copy a file; return ``None``, or a temporary name for :meth:`settle` if the driver could not be told.

        ``unchanged`` returns ``False`` if the file differs from ``entry``, or a process may be writing it. ChangedError
        if that is so after the copy, RefusedError with the driver's reason, OSError if the file cannot be copied now.
        """

    def settle(self, entry: Entry, name: str) -> bool:
        """Ask the driver to give an uploaded file its final name; return whether it has. RefusedError if it refuses."""

    def delete(self, path: str) -> None:
        """Remove the copy of a file that ranks have removed; OSError if that fails now.

        Do nothing if only the driver may remove it, and cannot be reached.
        """

    def close(self) -> None:
        """Release resources."""


def choose(job: Job, order: AgentOrder, link: DriverLink, node_rank: int, environ: Mapping[str, str]) -> Carrier | None:
    """Return the carrier of a node; ``None`` if it copies nothing.

    In local mode, all nodes share one folder, of which only the first copies files; and without an endpoint of the
    driver it copies them itself. Packages such as s3fs find credentials in ``environ``.
    """
    if job.output_dir is None or (order.on_driver and node_rank > 0):
        return None
    where = job.output_dir.where
    uploads = UrlWriter(order.root, where, environ) if is_url(where) else None
    if order.on_driver:
        return Direct(uploads or Folder(Path(where)), job.output_dir.limit)
    return ToDriver(order, link, job.deadlines.heartbeat_timeout, node_rank, uploads)


class ToDriver:
    """Sends each file to the driver over a connection of its own; or to a URL, where the driver gives it its name."""

    def __init__(
        self, order: AgentOrder, link: DriverLink, silence: float, node_rank: int, uploads: UrlWriter | None = None
    ) -> None:
        self.uploads = uploads
        self._order = order
        self._link = link
        self._silence = silence
        self._node_rank = node_rank
        self._number = 0

    @property
    def is_live(self) -> bool:
        return self.uploads is not None or self._is_connected

    @property
    def through_spark(self) -> bool:
        return self.uploads is None

    @property
    def _is_connected(self) -> bool:
        return self._order.endpoint is not None and self._link.is_open

    def carry(self, entry: Entry, source: str, unchanged: Callable[[], bool]) -> str | None:
        if self.uploads is None:
            self._send(Upload(entry, None, self._order.executor, self._order.secret), source)
            return None  # the driver compares digests, so it detects a change during the copy
        self._number += 1
        name = incoming(entry.path, self._node_rank, self._number)
        _put(self.uploads, source, name, unchanged)
        return None if self.settle(entry, name) else name

    def settle(self, entry: Entry, name: str) -> bool:
        assert self.uploads is not None
        if not self._is_connected:
            return False
        try:
            self._send(Upload(entry, name, self._order.executor, self._order.secret), None)
        except RequestRefusedError:
            self.uploads.remove(name)
            raise
        except OSError:
            return False
        return True

    def delete(self, path: str) -> None:
        if self._is_connected:
            self._send(Delete(path, self._order.executor, self._order.secret), None)

    def _send(self, request: Upload | Delete, source: str | None) -> None:
        assert self._order.endpoint is not None
        patience = max(self._silence, _MOVING)
        try:
            exchange.send_file(self._order.endpoint, request, source, patience)
        except ValueError as error:  # the answer is not a valid message
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        if self.uploads is not None:
            self.uploads.close()


def _put(place: Folder | UrlWriter, source: str, name: str, unchanged: Callable[[], bool]) -> None:
    """Copy a file to a folder or URL; ChangedError if it changes meanwhile."""
    try:
        place.put(source, name)
        if not unchanged():
            raise ChangedError(f"{source} changed while it was being copied")
    except OSError:
        with suppress(OSError):  # such as a part of the file, on a full disk
            place.remove(name)
        raise


class Direct:
    """Copies files to their final names in local mode, up to a total of ``limit`` bytes.

    Its node is the only one that writes there, so no driver has to give names.
    """

    is_live, through_spark = True, False

    def __init__(self, place: Folder | UrlWriter, limit: int) -> None:
        self.uploads = place if isinstance(place, UrlWriter) else None
        self._place = place
        self._limit = limit
        self._sizes: dict[str, int] | None = None
        self._held = 0  # bytes of all files together

    def carry(self, entry: Entry, source: str, unchanged: Callable[[], bool]) -> str | None:
        if self._sizes is None:
            place = self._place
            self._sizes = tree.sizes(str(place.root)) if isinstance(place, Folder) else own(place.sizes())
            self._held = sum(self._sizes.values())
        growth = entry.size - self._sizes.get(entry.path, 0)
        if self._held + growth > self._limit:
            raise OSError(beyond_limit(self._limit))
        part = incoming(entry.path, 0, os.getpid())
        _put(self._place, source, part, unchanged)
        self._place.move(part, entry.path)
        self._sizes[entry.path] = entry.size
        self._held += growth
        return None

    def settle(self, entry: Entry, name: str) -> bool:
        return True

    def delete(self, path: str) -> None:
        self._place.remove(path)
        if self._sizes is not None:
            self._held -= self._sizes.pop(path, 0)

    def close(self) -> None:
        if self.uploads is not None:
            self.uploads.close()
