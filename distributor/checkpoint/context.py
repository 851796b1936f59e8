"""The state of checkpointing in one process: where checkpoints are, how to reach other ranks, the save in progress."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # what ends its executors is registered before _finish
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distributor.checkpoint.catalog import Catalog
from distributor.checkpoint.exchange import Exchange, connect, connect_group
from distributor.checkpoint.records import Manifest, folder_name
from distributor.errors import ConfigurationError
from distributor.machine.storage import Storage, open_storage
from distributor.metrics import rank as reports
from distributor.values import lease_record
from distributor.values.checkpoints import PLACE, SAVING, Settings, from_environ
from distributor.values.environment import NODE_ID

if TYPE_CHECKING:
    from distributor.checkpoint.memory.memory import Memory

#: In a run without ``checkpoints=``; the call that needs a place is filled in.
NO_PLACE = "{}: this run has no place for checkpoints: pass Distributor(checkpoints=...)"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        step: the step of the training.
        path: the folder that holds its files, on this machine.
        metrics: the last value of each metric that rank 0 reported before the save, by the metric's name. A metric
            whose last value is not finite is missing.
    """

    step: int
    path: Path
    metrics: Mapping[str, float]

    def __fspath__(self) -> str:
        return str(self.path)


class Session:
    """What a process uses to save and load checkpoints: their place, and access to the other ranks."""

    def __init__(self, settings: Settings, only: str | None = None) -> None:
        self.settings = settings
        self.storage: Storage = open_storage(settings.checkpoints.dir)
        is_sole = settings.fence is not None and settings.fence.is_named
        self.catalog = Catalog(self.storage, settings.checkpoints, sole=is_sole, only=only)
        self.last: str | None = None  # folder of the last checkpoint that this attempt has committed
        self.problem = ""  # why the last save has failed, as far as it was warned of; "" if it has not
        self.unfinished: list[str] = []  # on rank 0, folders of saves in which a rank has failed, to be removed
        self.memory: Memory | None = None  # the rank's states in memory; None until they are needed
        self._exchange: tuple[Exchange, str] | None = None
        self._count = 0
        self._saving: threading.Thread | None = None
        self._staging: Path | None = None

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange[0]

    @property
    def origin(self) -> str:
        """The run and attempt, as in names of folders. Outside a run, a random text takes the place of the run."""
        assert self._exchange is not None
        return self._exchange[1]

    def at(self, settings: Settings, only: str | None = None) -> Session:
        """Return a session for another place, or one checkpoint there, with this one's access to the other ranks."""
        other = Session(settings, only)
        other._exchange, other._count = self._exchange, self._count
        return other

    def connect(self, environ: Mapping[str, str], what: str) -> None:
        if self._exchange is not None:
            return
        rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        if in_run(environ):
            run, attempt = environ["TORCHELASTIC_RUN_ID"], environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._exchange = connect(rank, world_size, attempt, what), f"{run}-{attempt}"
        else:
            exchange, token = connect_group(rank, world_size, secrets.token_hex(6), what)
            self._exchange = exchange, f"{token}-0"

    def next_key(self) -> str:
        """Return a new key under which ranks exchange values. All ranks get the same keys in the same order."""
        self._count += 1
        return str(self._count)

    def new_folder(self, step: int, key: str) -> str:
        """Return the folder name of a new checkpoint. It is the same on all ranks, and was never used before."""
        return folder_name(step, self.origin, int(key))

    @property
    def staging(self) -> Path:
        """This process's folder for files on their way to a URL or, outside a run, from one. It is removed at exit."""
        if self._staging is None:
            self._staging = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=self.settings.staging))
            atexit.register(_remove, str(self._staging), os.getpid())
        return self._staging

    def clear_staging(self) -> None:
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None

    def folder_here(self, folder: str) -> Path:
        """Return where the files of a checkpoint are on this machine; those from a URL, once they are downloaded."""
        if self.storage.root is not None:
            return self.storage.root / folder
        return Path(self.settings.staging or self.staging) / "checkpoints" / folder

    def checkpoint(self, manifest: Manifest) -> Checkpoint:
        return Checkpoint(manifest.step, self.folder_here(manifest.folder), dict(manifest.metrics))

    def check_fence(self) -> None:
        """Raise an OSError unless this run still has its name or folder, and this is the run's newest job."""
        fence = self.settings.fence
        record = None if fence is None else lease_record.find(open_storage(fence.place).read)
        if fence is None or (not fence.is_named and (record is None or record.holder is None)):
            return
        if record is None:
            raise OSError(
                f"{fence.place!r} has no record of this run's name, although the driver has written one there: the "
                "driver must see the same folder as the ranks. Pass a URL as checkpoints=, or omit name="
            )
        if record.run != fence.run:
            thing = "name" if fence.is_named else "folder for checkpoints"
            raise OSError(
                f"{record.holder or f'run {record.run}'} has taken the {thing} of this run: this run can commit no "
                "further checkpoints"
            )
        if record.attempt != fence.attempt:
            raise OSError(f"attempt {record.attempt} of this run has begun: earlier attempts can commit no checkpoints")

    def save_later(self, save: Callable[[], None]) -> None:
        """Call ``save`` in a thread, once the previous save has ended. The process does not end before the thread."""
        self.finish()
        thread = threading.Thread(target=save, name=SAVING)
        thread.start()
        self._saving = thread

    def finish(self) -> None:
        """Wait until the save in progress has ended, if there is one."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


_session: tuple[int, Session] | None = None

_told: int | None = None  # the process that has been told of its place


def _finish() -> None:
    """Wait for the save in progress at the process's end, while it can still use executors: stores' packages do."""
    if _session is not None and _session[0] == os.getpid():
        _session[1].finish()


with suppress(RuntimeError):  # the main thread has ended already
    threading._register_atexit(_finish)  # type: ignore[attr-defined]  # the last one registered is called first


def current(what: str, *, together: bool = True, needs_place: bool = True) -> Session:
    """Return this process's session, created at the first call. For calls ``together``, connect to the other ranks."""
    global _session, _told
    settings = from_environ(os.environ)
    if _session is None or _session[0] != os.getpid():
        _session = os.getpid(), Session(settings)
    elif settings.checkpoints.dir != _session[1].settings.checkpoints.dir:  # the user has set another
        _session[1].finish()
        _session = os.getpid(), _session[1].at(settings)
    if needs_place and not settings.is_given:
        if NODE_ID in os.environ:  # nodes may have different current directories
            raise ConfigurationError(NO_PLACE.format(what))
        if _told != os.getpid():
            _told = os.getpid()
            reports.warn(
                f"checkpoints are kept in {os.path.abspath('checkpoints')}: set {PLACE} to keep them elsewhere"
            )
    if together:
        _session[1].connect(os.environ, what)
    return _session[1]


def has_place(what: str) -> bool:
    """Return whether there is a place for checkpoints. In a run without one, warn once."""
    global _told
    if NODE_ID not in os.environ or from_environ(os.environ).is_given:
        return True
    if _told != os.getpid() and os.environ.get("RANK", "0") == "0":
        reports.warn(f"{NO_PLACE.format(what)}. Training begins anew")
    _told = os.getpid()
    return False


def in_run(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a rank of a ``distributor`` run.

    Ray's workers in a run have only ``DISTRIBUTOR_NODE_ID``, and processes of the user's own torchrun have only the
    other.
    """
    return NODE_ID in environ and bool(environ.get("TORCHELASTIC_RUN_ID"))
