"""Receives, on the driver, the new files of ranks. During the run, nodes send each file over a separate connection."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from distributor.channel import frames
from distributor.errors import StartError
from distributor.machine.storage import Folder, Storage, Url, is_url
from distributor.output.file_versions import Put, Remove, Version, Versions
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
        self._versions = Versions(before)
        self._coming = 0
        self._number = 0
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

        OSError if the connection ended or stalled, if the content is not as announced, or if the driver had the bytes
        already, but another node's change has just removed them.
        """
        entry, version = upload.entry, Version(upload.entry.digest, upload.entry.size)
        growth = self._versions.growth(entry.path, node, version)
        why: str | None = beyond_limit(self._limit)
        if self._versions.size + self._coming + growth <= self._limit:
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
        path = upload.entry.path
        try:
            if upload.uploaded is None and self._versions.knows(path, version):
                await self._change(path, node, version, None)
                return None
            came = upload.uploaded
            if came is None:
                self._number += 1
                came = incoming(path, node, self._number)
                _answer(writer, Proceed())
                await self._take(upload.entry, came, reader)
            await self._change(path, node, version, came)
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
                about = os.fstat(file.fileno())
                _answer(writer, Offer(path, about.st_size, about.st_mode & 0o777, about.st_mtime_ns))
                left = about.st_size
                while left:
                    piece = await _in_thread(file.read, min(left, _PIECE))
                    if not piece:
                        raise ConnectionError(f"{path} has become shorter while it was being sent to a node")
                    writer.write(piece)
                    await asyncio.wait_for(writer.drain(), self._silence)
                    left -= len(piece)
        _answer(writer, Received())

    async def delete(self, told: Delete, node: int, writer: asyncio.StreamWriter) -> None:
        """Stop keeping a node's version of a file, because its ranks have removed the file."""
        await self._change(told.path, node, None, None)
        self._refused.pop(told.path, None)
        _answer(writer, Received())

    async def _take(self, entry: Entry, name: str, reader: asyncio.StreamReader) -> None:
        descriptor: int | None = None
        try:
            descriptor = await _in_thread(_create, self._folder / name)
            await self._write(entry, descriptor, reader)
            await _in_thread(_finish, self._folder / name, entry)
        except BaseException:
            self._discard(name)
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)

    async def _write(self, entry: Entry, descriptor: int, reader: asyncio.StreamReader) -> None:
        found, left = hashlib.sha256(), entry.size
        while left:
            piece = await asyncio.wait_for(_piece(reader, min(left, _PIECE)), self._silence)
            await _in_thread(_keep, descriptor, piece, found)
            left -= len(piece)
            self._progress += 1
        if found.hexdigest() != entry.digest:
            raise ConnectionError(
                f"the SHA-256 of {entry.path} differs from the one that its node announced: the file changed while "
                "the node was sending it"
            )

    async def _change(self, path: str, node: int, version: Version | None, came: str | None) -> None:
        """Make one change at a time, because the name of each version depends on the other versions of the file."""
        async with self._changing:
            await _in_thread(self._change_now, path, node, version, came)

    def _change_now(self, path: str, node: int, version: Version | None, came: str | None) -> None:
        before = self._versions.saved(path)
        steps = self._versions.change(path, node, version)
        used = any(isinstance(step, Put) and step.source is None for step in steps)
        try:
            if used and came is None:
                raise ConnectionError(f"the driver no longer has the bytes of {path}, so the node must send them again")
            apply(self._storage, steps, came)
        except BaseException:
            self._versions.restore(path, before)
            used = False
            raise
        finally:
            if came is not None and not used:
                self._discard(came)

    def _discard(self, name: str) -> None:
        with suppress(OSError):
            self._storage.remove(name)

    @property
    def _folder(self) -> Path:
        """The driver's ``output_dir``: at a URL, nodes write and read files themselves."""
        assert self._storage.root is not None
        return self._storage.root

    def settle(self, brought: Iterable[Brought]) -> None:
        """Keep, in the order of node ranks, the files that nodes could send only with the results of Spark tasks."""
        for file in sorted(brought, key=lambda file: file.node):
            entry = file.entry
            version, came = Version(entry.digest, entry.size), file.uploaded or incoming(entry.path, file.node)
            if self._versions.size + self._versions.growth(entry.path, file.node, version) > self._limit:
                self._refused[entry.path] = beyond_limit(self._limit)
                if file.uploaded is not None:
                    self._discard(came)
                continue
            try:
                if file.uploaded is None:
                    self._write_pieces(entry, came, file.pieces)
                self._change_now(entry.path, file.node, version, came)
                self._refused.pop(entry.path, None)
            except OSError as error:
                self._refused[entry.path] = error.strerror or str(error)

    def _write_pieces(self, entry: Entry, name: str, pieces: Sequence[bytes]) -> None:
        found = hashlib.sha256()
        try:
            with open(_create(self._folder / name), "wb") as file:
                for piece in pieces:
                    found.update(piece)
                    file.write(piece)
            if found.hexdigest() != entry.digest:
                raise OSError(
                    "the file's SHA-256 differs from the one that its node announced: the file changed while the node "
                    "was sending it, or on the way through Spark"
                )
            _finish(self._folder / name, entry)
        except BaseException:
            self._discard(name)
            raise

    @property
    def warnings(self) -> list[str]:
        """Warnings, at the end of the run, about files that differ between nodes or could not be kept."""
        told = []
        if conflicts := self._versions.conflicts:
            told.append(
                f"nodes wrote different bytes to {_named(conflicts)}: the file of the first node keeps the name, and "
                "the others' names end with .node-1, .node-2, ..."
            )
        if self._refused:
            path, why = next(iter(self._refused.items()))
            told.append(
                f"{count(len(self._refused), 'new file')} could not be kept in output_dir (the first: {path!r}): {why}"
            )
        return told


def apply(storage: Storage, steps: Iterable[Put | Remove], came: str | None) -> None:
    """Perform steps in order. ``came`` is the temporary name of the file that has arrived."""
    for step in steps:
        if isinstance(step, Remove):
            storage.remove(step.name)
        elif step.source is not None:
            storage.copy(step.source, step.name)
        elif came is not None:
            storage.move(came, step.name)


def _create(path: Path) -> int:
    """Create an empty file to write to, and return its descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def _finish(path: Path, entry: Entry) -> None:
    """Set the mode and modification time of a received file to those that it had on its node."""
    with suppress(PermissionError, NotImplementedError):  # some file systems have no modes
        os.chmod(path, entry.mode)
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


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


def _keep(descriptor: int, piece: bytes, found: hashlib._Hash) -> None:
    found.update(piece)
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


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
        folder = Folder(Path(where), "node-0")  # so that `is_incoming` knows its temporary names
        yield OutputSink(folder, job.output_dir.limit, silence, tree.sizes(where))
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
