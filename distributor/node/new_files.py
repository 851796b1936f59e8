"""Finds new files in the ranks' current directory, and copies them to ``output_dir``.

A file is copied once no process of the node has it open for writing, and again if it changes. The directory is searched
at intervals, since inotify does not work on network file systems, and others may use up its limits.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from distributor.channel.requests import RequestRefusedError
from distributor.errors import StartError
from distributor.machine import open_files, processes
from distributor.machine.storage import is_url
from distributor.node import carriers, restoring, staging
from distributor.node.carriers import Carrier, ChangedError
from distributor.node.driver_link import DriverLink
from distributor.shipping import tree
from distributor.shipping.tree import Stamp
from distributor.text.wording import count, size, who
from distributor.values import layout
from distributor.values.environment import node_id
from distributor.values.files import Entry
from distributor.values.job import Job
from distributor.values.messages import FileLeft
from distributor.values.placement import Node
from distributor.values.plan import AgentOrder

#: The pause between searches: ``_INTERVAL`` seconds, or ``_SHARE`` durations of the last one if that is longer.
_INTERVAL = 0.5
_SHARE = 50

#: Seconds until a file is copied again, at least: after a copy or failure, or after the driver refused it.
_AGAIN = 5.0
_REFUSED = 30.0

_PATIENCE = 5  # at least this many durations of the last copy until the next

_UNREACHED = 3  # failures of connections after which a round's other files wait for the next

THROUGH_SPARK = 256 << 20  # bytes that all nodes together send through Spark if they cannot reach the driver


@dataclass(frozen=True)
class Watched:
    """The directory that is watched, and the node whose ranks run in it."""

    folder: str  # the ranks' current directory
    apart: set[str]  # real paths inside it that are not watched
    node: str  # the node's private folder
    node_id: str  # marks the node's processes in their environment
    first_rank: int
    local_world_size: int

    def stamps(self, failed: list[OSError] | None = None) -> dict[str, Stamp]:
        """Find the files. What other runs copy to their ``output_dir`` in this folder stays apart, also later."""
        for path in Path(self.node).parent.glob(f"{layout.PREFIX}*/{layout.OUTPUT_DIR}"):
            with suppress(OSError):  # the run has just ended, or is another user's
                self.apart.add(os.fsdecode(path.read_bytes()))
        return tree.stamps(self.folder, self.apart, failed)


@dataclass
class _Books:
    """What is known about files, by path. A *stamp* is a file's size, modification time and inode."""

    known: dict[str, Stamp]  # at the beginning, or at the last copy
    again: dict[str, float] = field(default_factory=dict)  # when it may be copied again, in time.monotonic()
    failed: dict[str, str] = field(default_factory=dict)  # why it could not be copied
    unsettled: dict[str, tuple[Entry, str]] = field(default_factory=dict)  # uploads unknown to the driver

    def new(self, there: Mapping[str, Stamp]) -> list[str]:
        """Return new and changed files, by modification time."""
        new = [path for path, stamp in there.items() if self.known.get(path) != stamp]
        return sorted(new, key=lambda path: there[path].mtime_ns)

    def wait(self, path: str, began: float, least: float) -> None:
        """Put off the next copy of a file by ``least`` seconds, or by more if the last try took long."""
        now = time.monotonic()
        self.again[path] = now + max(least, _PATIENCE * (now - began))

    def forget(self, path: str) -> None:
        """Forget a file that has been removed; if it appears again, it is new."""
        self.known.pop(path, None)
        self.unsettled.pop(path, None)


class NewFiles:
    """Copies new files to ``output_dir``; a thread does what blocks.

    Without a carrier there is no ``output_dir``, and new files are removed at the end of the run, of which the user is
    warned. ``through_spark`` is in bytes.
    """

    def __init__(
        self,
        watched: Watched,
        known: Mapping[str, Stamp],
        carrier: Carrier | None,
        tell: Callable[[str], None],
        pids: Callable[[], Mapping[int, int]],
        through_spark: int,
    ) -> None:
        self._watched = watched
        self._carrier = carrier
        self._tell = tell
        self._pids = pids
        self._through_spark = through_spark
        self._books = _Books({**known})
        self._warned = False
        self._ending = asyncio.Event()
        self._given_up = threading.Event()
        self._watching: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.left: tuple[FileLeft, ...] = ()  # what the node's Spark task must send through Spark

    def watch(self) -> NewFiles:
        self._watching = asyncio.ensure_future(self._watch())
        return self

    async def _watch(self) -> None:
        while not self._ending.is_set():
            took = await self._loop.run_in_executor(None, self._look)
            if took is None:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), max(_INTERVAL, _SHARE * took))

    async def finish(self, bringing: Callable[[bool], None]) -> None:
        """Copy the remaining files, once no process of the node is left.

        ``bringing`` is called with ``True`` if copying begins, and with ``False`` at the end in any case.
        """
        self._ending.set()
        if self._carrier is not None and not self._given_up.is_set():
            bringing(True)
        try:
            if self._watching is not None:
                await self._watching
            if not self._given_up.is_set():
                await self._loop.run_in_executor(None, self._finish)
        except Exception as error:  # such as an error of the URL's package: the node must still send its results
            self._tell(f"could not copy new files to output_dir: {type(error).__name__}: {error}")
        bringing(False)

    def give_up(self) -> None:
        self._given_up.set()
        self._ending.set()
        self.close()

    def on_owner_gone(self) -> None:
        """Stop copying to a folder or URL, since the owner has ended.

        Copying to the driver goes on: if the driver has ended too, the connections to it fail anyway.
        """
        if self._carrier is not None and not self._carrier.through_spark:
            self.give_up()

    def close(self) -> None:
        if self._carrier is not None:
            self._carrier.close()

    def _tell_soon(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._tell, text)

    def _look(self) -> float | None:
        """Search for new files, and copy them. Return the seconds of the search, ``None`` if no other is needed."""
        began = time.monotonic()
        failed: list[OSError] = []
        there = self._watched.stamps(failed)
        took, new = time.monotonic() - began, self._books.new(there)
        if self._carrier is None:
            if new:
                self._warn(new[0])
            return None if new else took
        if not self._carrier.is_live:
            return took
        if not failed:
            self._delete(there)
        self._settle()
        due = [path for path in new if began >= self._books.again.get(path, began)]
        if due:
            pids = [*processes.processes_of(self._watched.node_id), *self._pids().values()]
            self._bring(due, pids)
        return took

    def _bring(self, paths: Iterable[str], pids: Collection[int] = ()) -> list[str]:
        """Copy files that no process of ``pids`` is writing; return those that may be tried again."""
        failed, unreached = [], 0
        for path in paths:
            if self._given_up.is_set():
                break
            if unreached == _UNREACHED:
                failed.append(path)
                continue
            began = time.monotonic()
            try:
                self._bring_one(path, pids)
            except (FileNotFoundError, ChangedError):  # the next search finds it again
                continue
            except OSError as error:
                failed.append(path)
                unreached += isinstance(error, (ConnectionError, TimeoutError))
                self._books.failed[path] = error.strerror or str(error)
                self._books.wait(path, began, _AGAIN)
        return failed

    def _bring_one(self, path: str, pids: Collection[int]) -> None:
        assert self._carrier is not None
        books, folder = self._books, os.path.realpath(self._watched.folder)
        source = os.path.join(folder, path)

        began = time.monotonic()

        def unchanged() -> bool:
            return tree.stamp(source) == stamp and os.path.realpath(source) not in open_files.written(pids, folder)

        stamp = tree.stamp(source)
        if not unchanged():
            raise ChangedError(f"{path} is being written")
        entry = tree.describe(folder, path)
        if not unchanged():
            raise ChangedError(f"{path} is being written")
        try:
            name = self._carrier.carry(entry, source, unchanged)
        except RequestRefusedError:  # the driver warns the user, and may accept the file later
            books.wait(path, began, _REFUSED)
            return
        books.known[path] = stamp
        books.failed.pop(path, None)
        books.unsettled.pop(path, None)
        books.wait(path, began, _AGAIN)
        if name is not None:
            books.unsettled[path] = entry, name

    def _settle(self) -> None:
        """Tell the driver about uploads of which it could not be told before."""
        assert self._carrier is not None
        for path, (entry, name) in list(self._books.unsettled.items()):
            try:
                settled = self._carrier.settle(entry, name)
            except RequestRefusedError:
                settled = True
            if settled:
                self._books.unsettled.pop(path)

    def _delete(self, there: Collection[str]) -> None:
        """Remove the copies of files that ranks have removed, also of those that were there at the beginning."""
        assert self._carrier is not None
        for path in [path for path in self._books.known if path not in there]:
            if self._given_up.is_set():  # the node removes its folder
                return
            if os.path.isfile(os.path.join(self._watched.folder, path)):  # in another run's output_dir
                continue
            try:
                self._carrier.delete(path)
            except OSError:
                continue
            self._books.forget(path)

    def _finish(self) -> None:
        missed: list[OSError] = []
        there = self._watched.stamps(missed)
        new = self._books.new(there)
        if self._carrier is None:
            if new and not self._warned:
                self._warn(new[0])
            return
        failed = new
        if self._carrier.is_live:
            if not missed:
                self._delete(there)
            failed = self._bring(self._bring(new))  # try failed files once more
            self._settle()
        for error in missed[:1]:
            self._tell_soon(f"could not search everywhere for new files: {error}")
        unsettled = [FileLeft(entry, None, name) for entry, name in self._books.unsettled.values()]
        if self._carrier.through_spark:
            self.left = (*unsettled, *self._to_spark(failed))
            return
        self.left = tuple(unsettled)
        if failed:
            what = f"{count(len(failed), 'new file')} to output_dir (the first: {failed[0]!r})"
            self._tell_soon(f"could not copy {what}: {self._books.failed[failed[0]]}")

    def _to_spark(self, paths: Iterable[str]) -> list[FileLeft]:
        """Return the files that fit through Spark, and warn of the others."""
        left, lost, free = [], [], self._through_spark
        for path in paths:
            source = os.path.join(self._watched.folder, path)
            try:
                entry = tree.describe(self._watched.folder, path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._tell_soon(f"could not copy {path!r} to output_dir: {error}")
                continue
            if entry.size > free:
                lost.append(path)
                continue
            free -= entry.size
            left.append(FileLeft(entry, source))
        if lost:
            self._tell_soon(
                f"could not copy {count(len(lost), 'new file')} to output_dir (the first: {lost[0]!r}): the node "
                f"cannot reach the driver, and may send at most {size(self._through_spark)} through Spark. Pass a URL "
                "as output_dir, or open the ports of driver_ports="
            )
        return left

    def _warn(self, path: str) -> None:
        """Warn that new files are removed when the run ends."""
        self._warned = True
        self._tell_soon(
            f"removes new files of its ranks when the run ends, such as {path!r} (written by {self._writer(path)}). "
            "Pass output_dir= to bring such files back, or write to an absolute path on permanent storage"
        )

    def _writer(self, path: str) -> str:
        """Return which ranks may have written a file, in words."""
        first, pids = self._watched.first_rank, self._pids()
        ranks = range(first, first + self._watched.local_world_size)
        if len(ranks) == 1:
            return who(ranks)
        folder = os.path.realpath(self._watched.folder)
        writer = open_files.written(pids.values(), folder).get(os.path.join(folder, path))
        found = [first + local_rank for local_rank, pid in pids.items() if pid == writer]
        return who(found) if found else f"one of {who(ranks)}"


async def begin_files(
    job: Job,
    order: AgentOrder,
    node: Node,
    link: DriverLink,
    pids: Callable[[], Mapping[int, int]],
    tell: Callable[[str], None],
) -> NewFiles | None:
    """Restore the files of earlier runs, and begin to watch; ``None`` if new files stay where ranks write them.

    StartError if this node cannot use ``output_dir``, or it contains the ranks' current directory.
    """
    folder = staging.current_folder(job, order)
    carrier = carriers.choose(job, order, link, node.node_rank, {**os.environ, **job.env})
    if carrier is None and (order.on_driver or folder is None):
        return None  # files stay where they are
    try:
        folder, loop = os.getcwd() if folder is None else folder, asyncio.get_running_loop()
        if (order.on_driver or order.in_place) and job.output_dir is not None and not is_url(job.output_dir.where):
            if os.path.realpath(folder) == job.output_dir.where:
                return None  # files are there already
            if os.path.realpath(folder).startswith(job.output_dir.where + os.sep):
                raise StartError(
                    f"output_dir {job.output_dir.where!r} contains the ranks' current directory, {folder}: pass an "
                    "output_dir that is inside the current directory or beside it"
                )
        uploads = None if carrier is None else carrier.uploads
        restore = partial(restoring.restore, job, order, folder, node.node_rank, uploads, reached=link.is_open)
        await loop.run_in_executor(None, restore)
        logs, checkpoints = job.output.log_dir, job.checkpoints
        others = [
            job.output_dir and job.output_dir.where,
            logs and os.path.abspath(logs),
            checkpoints and checkpoints.dir,
            job.env.get("TMPDIR"),
        ]
        apart = {os.path.realpath(os.path.join(folder, other)) for other in others if other}
        if job.output_dir is not None and not is_url(job.output_dir.where):
            Path(order.folder, layout.OUTPUT_DIR).write_bytes(os.fsencode(job.output_dir.where))
        mark = node_id(job.job_id, node.leader)
        watched = Watched(folder, apart, order.folder, mark, node.first_rank, node.local_world_size)
        through_spark = THROUGH_SPARK // max(1, link.nodes)
        known = await loop.run_in_executor(None, watched.stamps)
        return NewFiles(watched, known, carrier, tell, pids, through_spark).watch()
    except BaseException:
        if carrier is not None:
            carrier.close()
        raise
