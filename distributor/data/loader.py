"""Delivers the rows of a snapshot to one rank, batch after batch."""

from __future__ import annotations

import operator
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from distributor.data.manifest import SnapshotManifest
from distributor.data.reader import DataError, EvenWindows, Files, Windows, make_windows, open_files, read_manifest
from distributor.data.row_order import RowOrder, check_batch, lanes_of, unit_rows, window_rows
from distributor.errors import ConfigurationError
from distributor.metrics import rank as reports
from distributor.values.dataset import Dataset

Batch = dict[str, Any]

_TELL = 0.5  # seconds of waiting after which the driver is told
_GROUP_BYTES = 1 << 20  # of batches that are gathered together
_AHEAD = 4  # groups that are ready before they are asked for

#: Marks the rows of a batch that are not repeated ones, with ``drop_last=False``.
VALID = "_valid"


@dataclass(frozen=True)
class RankDataset:
    """A snapshot, as one rank sees it."""

    folder: str
    manifest: SnapshotManifest
    lanes: int
    rank: int
    world_size: int

    @classmethod
    def open(cls, dataset: Dataset, rank: int, world_size: int) -> RankDataset:
        manifest = read_manifest(dataset.folder)
        if dataset.snapshot not in ("", manifest.id):
            raise DataError(
                f"the folder {dataset.folder} has another snapshot on this node ({manifest.id}) than the run began "
                f"with ({dataset.snapshot}). It must be a folder that all nodes share, and stay as it is during the run"
            )
        return cls(dataset.folder, manifest, dataset.lanes, rank, world_size)

    def __len__(self) -> int:
        return self.manifest.rows

    def loader(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool | None = None,
        map: Callable[[Batch], Any] | None = None,
        map_threads: int = 0,
    ) -> Loader:
        """Return a loader of this rank's share of each global batch. All ranks must pass the same arguments.

        Args:
            batch_size: number of rows of one rank's batch.
            global_batch_size: number of rows of all ranks' batches together, in place of ``batch_size``: it stays the
                same if the number of ranks changes. It is a multiple of the data's lanes.
            shuffle: whether each epoch has its own random order.
            seed: chooses the orders.
            drop_last: whether rows that fill no global batch are left out of an epoch (default: as ``shuffle``).
                Otherwise, the last batches repeat rows, and ``batch["_valid"]`` is false for these.
            map: a function of a batch, such as one that decodes images. Threads call it.
            map_threads: number of these threads (default 0: as many as this rank may use CPUs).

        Raises:
            ConfigurationError: an argument is wrong, or the table has too few rows for one batch.
        """
        if (batch_size is None) == (global_batch_size is None):
            raise ConfigurationError("loader: pass either batch_size= or global_batch_size=")
        if batch_size is not None:
            rows = _whole("batch_size", batch_size) * self.world_size
        else:
            rows = _whole("global_batch_size", global_batch_size)
        lanes_of(self.lanes, self.rank, self.world_size)
        check_batch(self.lanes, rows)
        per_lane, row_bytes = rows // self.lanes, self.manifest.row_bytes
        plan = RowOrder(
            rows=len(self),
            unit=unit_rows(row_bytes),
            lanes=self.lanes,
            per_lane=per_lane,
            window=window_rows(row_bytes, self.lanes, per_lane),
            seed=_whole("seed", seed),
            epoch=0,
            shuffle=shuffle,
            drop_last=shuffle if drop_last is None else drop_last,
        )
        if not plan.steps:
            raise ConfigurationError(
                f"the data has {len(self)} rows, too few for one global batch of {rows} from {self.lanes} lanes: use a "
                "smaller batch, fewer lanes (Data(..., lanes=N)) or drop_last=False"
            )
        whole = plan.lanes * plan.steps * plan.per_lane  # of an epoch: then each lane is one window
        plan = replace(plan, window=min(plan.window, whole))
        return Loader(self, plan, map, map_threads or len(os.sched_getaffinity(0)))


def _whole(name: str, value: Any) -> int:
    """Return an argument, maybe a number of NumPy, as an ``int``."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigurationError(f"loader: {name}= must be a whole number, not {value!r}") from None


class Loader:
    """The batches of one rank: an iterator over the rest of an epoch, with a state that checkpoints keep.

    An iteration that is continued after another has begun is a ConfigurationError.

    A batch is a dict: a tensor [rows, ...] for each field of numbers, values and offsets for lists of different
    lengths, and a list of ``str`` or ``bytes`` for texts and binary values.

    Attributes:
        epoch: the current epoch, counted from 0.
        waited: seconds for which training has waited for batches.
    """

    def __init__(self, table: RankDataset, plan: RowOrder, map: Callable[[Batch], Any] | None, threads: int) -> None:
        self.waited = 0.0
        self._told = 0.0  # of waited, what the driver knows
        self._table = table
        self._snapshot = table.manifest.id  # once: it is a digest of all blocks
        self._plan = plan
        self._step = 0  # batches of this epoch that were delivered
        self._map = map
        self._threads = threads
        self._device: torch.device | None = None
        self._first = 0  # the step at which this epoch begins: a later one where a state was loaded
        self._resumes = False  # the next iteration continues an epoch, where a state was loaded
        self._scrub: _Scrub | None = None  # begins with the first batch
        self._windows: Windows | None = None  # of the last epoch: new memory costs more than a read
        self._turn = object()  # of the iteration that began last

    @property
    def epoch(self) -> int:
        return self._plan.epoch

    def __len__(self) -> int:
        """Number of batches of an epoch; the same on all ranks."""
        return self._plan.steps

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of ``count``, beginning with one that was interrupted."""
        self._step, self._resumes = self._first, True  # even if batches were looked at before
        while (epoch := self.epoch) < count:
            plan = self._plan
            yield epoch
            if self._plan is plan or self._is_left:
                self._next_epoch()

    def tensors_on(self, device: str | torch.device) -> Loader:
        """Deliver tensors on a device; copies to a GPU do not hold up the CPU. Returns the loader."""
        self._device = torch.device(device)
        return self

    def _next_epoch(self) -> None:
        self._plan = replace(self._plan, epoch=self._plan.epoch + 1)
        self._step, self._first, self._resumes = 0, 0, False

    @property
    def _is_left(self) -> bool:
        """Whether an iteration before was left early."""
        return self._step > 0 and not self._resumes

    def __iter__(self) -> Iterator[Any]:
        if self._is_left:
            self._next_epoch()
        self._turn = turn = object()
        self._resumes = True
        while self._resumes:  # again after each state that is loaded within the loop
            self._resumes = False
            with closing(self._rest()) as batches:
                for batch in batches:
                    yield batch
                    if self._turn is not turn:
                        raise ConfigurationError(
                            "the loader was iterated elsewhere before this loop has ended: take a loader of its own "
                            "for that, runtime.dataset(name).loader(...)"
                        )
                    if self._resumes:
                        break

    def _rest(self) -> Generator[Any]:
        """Yield the batches that are left of the epoch."""
        plan = self._plan
        with _Prefetch(self._groups(plan, self._step), self._map, self._threads) as batches:
            deliver = _Deliver(self._device)
            for step in range(self._step + 1, plan.steps + 1):
                begin = time.perf_counter()
                batch = deliver(batches.next())
                self._wait(time.perf_counter() - begin)
                self._step = step
                if step == plan.steps:
                    self._tell()
                    if self._scrub is not None:
                        self._scrub.join()
                    self._next_epoch()
                yield batch

    def _wait(self, seconds: float) -> None:
        self.waited += seconds
        reports.waited(seconds)
        if self.waited - self._told > _TELL:
            self._tell()

    def _tell(self) -> None:
        """Tell the driver for how long training has waited since the last time."""
        reports.spent("data", self.waited - self._told)
        self._told = self.waited

    def _groups(self, plan: RowOrder, step: int) -> Iterator[list[Batch]]:
        table = self._table
        lanes = lanes_of(table.lanes, table.rank, table.world_size)
        files = open_files(table.folder, table.manifest)
        windows, self._windows = self._windows or make_windows(table.manifest.fields, len(lanes), plan.window), None
        is_even = all(isinstance(each, EvenWindows) for each in windows)
        size = max(1, int(table.manifest.row_bytes * len(lanes) * plan.per_lane))  # bytes of a batch
        most = max(1, _GROUP_BYTES // size) if is_even and self._map is None else 1
        if self._scrub is None:
            self._scrub = _scrubs.setdefault((table.folder, self._snapshot), _Scrub(table))
            self._scrub.begin()
        try:
            yield from _Gather(plan, lanes, files, windows, self._scrub, most).groups(step)
        finally:
            files.close()
            if self._plan.window == plan.window:
                self._windows = windows

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands, counted in batches that were delivered: the same on all ranks."""
        plan = self._plan
        return {
            "snapshot": self._snapshot,
            "seed": plan.seed,
            "epoch": plan.epoch,
            "step": self._step,
            "global_batch_size": plan.lanes * plan.per_lane,
            "lanes": plan.lanes,
            "unit": plan.unit,
            "window": plan.window,
            "shuffle": plan.shuffle,
            "drop_last": plan.drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader of the same snapshot stood, with any number of ranks that divides the lanes.

        A loop over this loader continues there with its next batch.

        Raises:
            ConfigurationError: the state is of another snapshot, or of batches that cannot be continued.
        """
        now = self.state_dict()
        if state["snapshot"] != now["snapshot"]:
            raise ConfigurationError(
                f"the checkpoint's data is another snapshot ({state['snapshot']}) than this run's ({now['snapshot']}): "
                "its rows have changed. Leave the loader out of load_checkpoint to train on these rows from the start"
            )
        for key, argument in (("global_batch_size", "global_batch_size"), ("lanes", "Data(lanes=...)")):
            if state[key] != now[key]:
                raise ConfigurationError(
                    f"the checkpoint's data was read with {argument} {state[key]}, but this loader has {now[key]}: "
                    f"pass {state[key]}"
                )
        kept = {key: state[key] for key in ("seed", "epoch", "unit", "window", "shuffle", "drop_last")}
        self._plan, self._windows = replace(self._plan, **kept), None
        self._step, self._first, self._resumes = state["step"], state["step"], True


class _Gather:
    """Reads windows of a rank's lanes, and gathers batches from them."""

    def __init__(self, plan: RowOrder, lanes: range, files: Files, windows: Windows, scrub: _Scrub, most: int) -> None:
        self._plan = plan
        self._lanes = lanes
        self._files = files
        self._scrub = scrub
        self._windows = windows
        self._most = most  # batches of a group
        self._order: Any = np.empty((len(lanes), plan.window), "int64")  # rows of windows, by position modulo window
        self._valid: Any = np.empty((len(lanes), plan.window), bool)

    def groups(self, first: int) -> Iterator[list[Batch]]:
        """Yield consecutive batches, gathered together while no lane needs its next window."""
        plan, most = self._plan, self._most
        per_lane, round_steps = plan.per_lane, plan.window // plan.per_lane
        ends: Any = np.full(len(self._lanes), first)  # steps at which lanes need their next windows
        step = first
        while step < plan.steps:
            for index in np.flatnonzero(ends == step).tolist():
                begin, ends[index] = plan.window_at(self._lanes[index], step)
                self._read(index, self._lanes[index], begin * per_lane, int(ends[index]) * per_lane)
            self._files.finish()
            self._scrub.check()
            count = min(most, int(ends.min()) - step, round_steps - step % round_steps)
            rows = self._taken(self._order, step % round_steps, count)
            fields = {name: value for each in self._windows for name, value in each.gather(rows, per_lane).items()}
            if not plan.drop_last:
                valid = self._taken(self._valid, step % round_steps, count)
                fields[VALID] = torch.from_numpy(valid.copy())  # the next window takes its place in the ring
            yield [fields] if count == 1 else _split(fields, count)
            step += count

    def _taken(self, ring: Any, step: int, count: int) -> Any:
        """Return what the ring has for a number of batches, batch after batch and lane after lane; maybe a view."""
        per_lane = self._plan.per_lane
        taken = ring[:, step * per_lane : (step + count) * per_lane]
        return taken.reshape(-1, count, per_lane).swapaxes(0, 1).reshape(-1)

    def _read(self, index: int, lane: int, start: int, stop: int) -> None:
        plan = self._plan
        pieces = self._files.pieces(*plan.pieces(lane, start, stop))
        for each in self._windows:
            each.fill(self._files, index, pieces)
        order = plan.order(lane, start, stop)
        _put(self._order[index], start, order + index * plan.window)
        if not plan.drop_last:
            _put(self._valid[index], start, plan.is_valid(lane, start + order))


def _put(ring: Any, start: int, values: Any) -> None:
    """Set the elements of a ring from a position on."""
    at = start % len(ring)
    before = len(ring) - at  # elements until the ring begins anew
    ring[at : at + len(values)] = values[:before]
    ring[: max(0, len(values) - before)] = values[before:]


def _split(fields: Batch, count: int) -> list[Batch]:
    """Return the batches that were gathered together."""
    split = (value.view(count, -1, *value.shape[1:]).unbind() for value in fields.values())
    return [dict(zip(fields, values)) for values in zip(*split)]


class _Scrub:
    """Compares a rank's share of the blocks with their checksums, once, beside the first epoch."""

    def __init__(self, table: RankDataset) -> None:
        self._table = table
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="distributor-data-check", daemon=True)

    def begin(self) -> None:
        """Begin, unless another loader of this process has."""
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        files = open_files(self._table.folder, self._table.manifest)
        try:
            for block in range(self._table.rank, files.blocks, self._table.world_size):
                files.check(block)
        except BaseException as error:
            self._error = error
        finally:
            files.close()

    def check(self) -> None:
        """Raise what was found so far."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait until all blocks are compared, and raise what was found."""
        self._thread.join()
        self.check()


#: By folder and snapshot: a process compares each once.
_scrubs: dict[tuple[str, str], _Scrub] = {}


class _Prefetch:
    """Makes batches in a thread, and maps them in others, ahead of training."""

    def __init__(self, groups: Iterator[list[Batch]], map: Callable[[Batch], Any] | None, threads: int) -> None:
        self._groups = groups
        self._group: Iterator[Any] = iter(())  # what is delivered now
        self._map = map
        self._pool = None if map is None else ThreadPoolExecutor(threads, "distributor-data-map")
        self._ready: queue.Queue[Any] = queue.Queue(_AHEAD + (0 if map is None else threads))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distributor-data-read", daemon=True)

    def __enter__(self) -> _Prefetch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        while self._thread.is_alive():
            self._drain()
            self._thread.join(0.01)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _drain(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return

    def _run(self) -> None:
        try:
            for group in self._groups:
                self._ready.put(group if self._pool is None else [self._pool.submit(self._mapped, group[0])])
                if self._ended.is_set():
                    break
        except BaseException as error:
            self._ready.put(_Failed(error))
        finally:
            self._groups.close()  # type: ignore[attr-defined]

    def _mapped(self, batch: Batch) -> Any:
        assert self._map is not None
        return self._map(batch)

    def next(self) -> Any:
        item = next(self._group, None)
        if item is None:
            group = self._ready.get()
            if isinstance(group, _Failed):
                raise group.error
            self._group = iter(group)
            item = next(self._group)
        return item.result() if isinstance(item, Future) else item


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _Deliver:
    """Copies batches to a device: over a ring of pinned buffers if it is a GPU, without waiting for the copy."""

    _RING = 3

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._rings: dict[str, deque[tuple[torch.Tensor, Any]]] = {}

    def __call__(self, batch: Any) -> Any:
        return batch if self._device is None else self._moved("", batch)

    def _moved(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._moved(f"{name}/{key}", each) for key, each in value.items()}
        if isinstance(value, (tuple, list)):
            parts = [
                each if isinstance(each, (str, bytes)) else self._moved(f"{name}/{index}", each)
                for index, each in enumerate(value)
            ]
            return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
        if not isinstance(value, torch.Tensor):
            return value
        if self._device is None or self._device.type != "cuda":
            return value.to(self._device)
        pinned, used = self._slot(name, value)
        pinned.copy_(value)
        moved = pinned.to(self._device, non_blocking=True)
        used.record(torch.cuda.current_stream(self._device))
        return moved

    def _slot(self, name: str, value: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return a pinned buffer that no copy uses any more, and the event after its next copy."""
        ring = self._rings.setdefault(name, deque())
        if len(ring) < self._RING or ring[0][0].shape != value.shape:
            if len(ring) >= self._RING:
                ring.popleft()
            slot = torch.empty_like(value, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            slot = ring.popleft()
            slot[1].synchronize()
        ring.append(slot)
        return slot
