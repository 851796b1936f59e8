"""Receives, on the driver, the new files of ranks. During the run, nodes send each file over a separate connection."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from distributor.channel import frames
from distributor.errors import StartError
from distributor.machine.storage import Folder, Storage, Url, is_url
from distributor.output.kept_files import KeptFiles, Version
from distributor.shipping import project, tree
from distributor.text.wording import count
from distributor.values.files import WITH_THE_JOB, Brought, Entry, beyond_limit, incoming, mark, own
from distributor.values.job import Job, OutputDir
from distributor.values.messages import Delete, Message, Offer, Proceed, Received, Refused, Upload

_PIECE = 1 << 20  # bytes to read at a time

_NAMED = 3  # files that a warning names

T = TypeVar("T")


class OutputSink:
    """Receives the new files of ranks that nodes send for ``output_dir``.

    Call ``receive``, ``give`` and ``delete`` in the channel's thread, and ``settle`` only once nodes can send no more
    files over the channel.
    """

    def __init__(self, storage: Storage, limit: int, silence: float, before: Mapping[str, int] | None = None) -> None:
        self._storage = storage
        self._limit = limit  # bytes of all files together
        self._silence = silence  # seconds within which a node must send or take the next piece of a file
        self._files = KeptFiles(storage, before)
        self._coming = 0  # bytes that have been accepted, but have not all arrived
        self._number = 0  # of the last temporary name
        self._progress = 0
        self._changing = asyncio.Lock()
        self._refused: dict[str, str] = {}

    def begin(self) -> None:
        """Make a new lock for the run's next job, because a lock serves one event loop, and each job has its own."""
        self._changing = asyncio.Lock()

    @property
    def progress(self) -> int:
        return self._progress

    async def receive(
        self, upload: Upload, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Keep a file that a node has announced. If the driver needs its bytes, receive them over the same connection.

        OSError if the connection ended or stalled, or if the content is not as announced.
        """
        entry, version = upload.entry, Version(upload.entry.digest, upload.entry.size)
        growth = self._files.growth(entry.path, node, version)
        why: str | None = beyond_limit(self._limit)
        if self._files.size + self._coming + growth <= self._limit:
            self._coming += max(0, growth)
            try:
                why = await self._accept(upload, node, version, reader, writer)
            except BaseException as error:
                self._refused[entry.path] = str(error) or "the run ended before the file arrived"
                raise
            finally:
                self._coming -= max(0, growth)
        if why is not None:
            self._refused[entry.path] = why
            _answer(writer, Refused(why))
            return
        self._refused.pop(entry.path, None)
        self._progress += 1
        _answer(writer, Received())

    async def _accept(
        self,
        upload: Upload,
        node: int,
        version: Version,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> str | None:
        """Keep a file, after receiving its bytes if needed. Return why it cannot be kept."""
        path, arrived = upload.entry.path, upload.uploaded
        try:
            if arrived is None:
                if await self._keep(path, node, version, None):
                    return None
                self._number += 1
                arrived = incoming(path, node, self._number)
                _answer(writer, Proceed())
                await self._take(upload.entry, arrived, reader)
            await self._keep(path, node, version, arrived)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:  # the store cannot keep the file
            return error.strerror or str(error)
        return None

    async def give(self, writer: asyncio.StreamWriter) -> None:
        """Send a node the files in ``output_dir``, with which its ranks start.

        OSError if a file cannot be read or has become shorter, or if the connection has ended or stalled.
        """
        folder = self._folder
        for path in await _in_thread(tree.sizes, str(folder)):
            with open(folder / path, "rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                _answer(writer, Offer(path, stat.st_size, stat.st_mode & 0o777, stat.st_mtime_ns))
                left = stat.st_size
                while left:
                    piece = await _in_thread(file.read, min(left, _PIECE))
                    if not piece:
                        raise ConnectionError(f"{path} has become shorter while it was being sent to a node")
                    writer.write(piece)
                    await asyncio.wait_for(writer.drain(), self._silence)
                    left -= len(piece)
        _answer(writer, Received())

    async def delete(self, request: Delete, node: int, writer: asyncio.StreamWriter) -> None:
        """Stop keeping a node's version of a file, because its ranks have removed the file."""
        async with self._changing:
            await _in_thread(self._files.remove, request.path, node)
        self._refused.pop(request.path, None)
        _answer(writer, Received())

    async def _take(self, entry: Entry, name: str, reader: asyncio.StreamReader) -> None:
        """Receive the bytes of a file, under a temporary name."""
        file: _Arriving | None = None
        try:
            file, left = await _in_thread(_Arriving, self._folder / name, entry), entry.size
            while left:
                piece = await asyncio.wait_for(_piece(reader, min(left, _PIECE)), self._silence)
                await _in_thread(file.write, piece)
                left -= len(piece)
                self._progress += 1
            await _in_thread(file.finish)
        except BaseException:
            self._discard(name)
            raise
        finally:
            if file is not None:
                file.close()

    async def _keep(self, path: str, node: int, version: Version, arrived: str | None) -> bool:
        """Change one file at a time: the name of a node's depends on which others are kept."""
        async with self._changing:
            return await _in_thread(self._keep_now, path, node, version, arrived)

    def _keep_now(self, path: str, node: int, version: Version, arrived: str | None) -> bool:
        try:
            return self._files.keep(path, node, version, arrived)
        except BaseException:
            if arrived is not None:
                self._discard(arrived)
            raise

    def _discard(self, name: str) -> None:
        with suppress(OSError):
            self._storage.remove(name)

    @property
    def _folder(self) -> Path:
        """The driver's ``output_dir``: at a URL, nodes write and read files themselves."""
        assert self._storage.root is not None
        return self._storage.root

    def settle(self, brought: Iterable[Brought]) -> None:
        """Keep the files that nodes could send only with the results of Spark tasks."""
        for file in brought:
            entry = file.entry
            version, arrived = Version(entry.digest, entry.size), file.uploaded or incoming(entry.path, file.node)
            try:
                if self._files.size + self._files.growth(entry.path, file.node, version) > self._limit:
                    self._discard(arrived)
                    raise OSError(beyond_limit(self._limit))
                if file.uploaded is None:
                    self._write_pieces(entry, arrived, file.pieces)
                self._keep_now(entry.path, file.node, version, arrived)
                self._refused.pop(entry.path, None)
            except OSError as error:
                self._refused[entry.path] = error.strerror or str(error)

    def _write_pieces(self, entry: Entry, name: str, pieces: Sequence[bytes]) -> None:
        try:
            with closing(_Arriving(self._folder / name, entry)) as file:
                for piece in pieces:
                    file.write(piece)
                file.finish()
        except BaseException:
            self._discard(name)
            raise

    @property
    def warnings(self) -> list[str]:
        """Warnings, at the end of the run, about files that differ between nodes or could not be kept."""
        texts = []
        if conflicts := self._files.conflicts:
            texts.append(
                f"nodes wrote different bytes to {_named(conflicts)}: the file of the first node keeps the name, and "
                "the others' names end with .node-1, .node-2, ..."
            )
        if self._refused:
            path, why = next(iter(self._refused.items()))
            texts.append(
                f"{count(len(self._refused), 'new file')} could not be kept in output_dir (the first: {path!r}): {why}"
            )
        return texts


class _Arriving:
    """A new file, which must have the content that its node has announced."""

    def __init__(self, path: Path, entry: Entry) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))
        self._entry = entry
        self._digest = hashlib.sha256()

    def write(self, piece: bytes) -> None:
        self._digest.update(piece)
        left = memoryview(piece)
        while left:
            left = left[self._file.write(left) :]

    def finish(self) -> None:
        """Check the content, and give the file the mode and modification time that it had on its node."""
        entry = self._entry
        if self._digest.hexdigest() != entry.digest:
            raise ConnectionError(
                f"the SHA-256 of {entry.path} differs from the one that its node announced: the file changed while the "
                "node was sending it, or on the way"
            )
        with suppress(PermissionError, NotImplementedError):  # some file systems have no modes
            os.chmod(self._file.name, entry.mode)
        os.utime(self._file.name, ns=(entry.mtime_ns, entry.mtime_ns))

    def close(self) -> None:
        self._file.close()


def _answer(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(frames.pack(message))


async def _piece(reader: asyncio.StreamReader, most: int) -> bytes:
    """Return the next ``most`` bytes of a file; ConnectionError if the connection ends before."""
    data = bytearray()
    while len(data) < most:
        got = await reader.read(most - len(data))
        if not got:
            raise ConnectionError("the connection ended before the whole file had arrived")
        data += got
    return bytes(data)


def _named(paths: Sequence[str]) -> str:
    return ", ".join(map(repr, paths[:_NAMED])) + ", ..." * (len(paths) > _NAMED)


async def _in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Call a function in a thread, and wait until the function ends, even if the caller is cancelled meanwhile."""
    future = asyncio.get_running_loop().run_in_executor(None, partial(call, *arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def held_now(kept: OutputDir | None) -> OutputDir | None:
    """Return the description of ``output_dir`` for a run's next job, whose ranks start with what is there now.

    It has the present size and, if ``kept`` had a zip of the files and they are not too large, a new zip. A URL's
    stays, since nodes read the files there. OSError if a file cannot be read.
    """
    if kept is None or is_url(kept.where):
        return kept
    folder = Path(kept.where)
    sizes = tree.sizes(str(folder))
    held = sum(sizes.values())
    with_the_job = kept.archive is not None and held <= WITH_THE_JOB
    archive = project.pack_files(folder, [folder / name for name in sizes]) if with_the_job else None
    return replace(kept, held=held, archive=archive)


@contextmanager
def keep(job: Job) -> Iterator[OutputSink | None]:
    """Make ``output_dir`` ready for the new files of all jobs of a run, of which ``job`` is the first.

    At a URL, nodes check by a marker file that they write to the same place as the driver. StartError if the driver
    cannot read or write there.
    """
    if job.output_dir is None:
        yield None
        return
    where, silence = job.output_dir.where, job.deadlines.heartbeat_timeout
    if not is_url(where):
        yield OutputSink(Folder(Path(where)), job.output_dir.limit, silence, tree.sizes(where))
        return
    name = mark(job.run_id)
    try:
        url = Url(where)
        before = own(url.sizes())
        url.write(name, b"")
    except OSError as error:
        raise StartError(f"output_dir {where!r} cannot be used: {error}") from None
    try:
        yield OutputSink(url, job.output_dir.limit, silence, before)
    finally:
        with suppress(OSError):
            url.remove(name)
