"""Plan which rank writes which tensors of a checkpoint, and write them as ``torch.distributed.checkpoint`` (DCP) does.

If several ranks have the same tensor in full, such as a weight under DDP, the rank with the lowest number writes it. A
DTensor is split over the ranks, and each rank writes its own part.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import astuple
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config

from distributor.checkpoint import pickles
from distributor.checkpoint.exchange import Exchange
from distributor.checkpoint.memory.states import Seat, padded, peer_of
from distributor.checkpoint.pinned import Pinned
from distributor.checkpoint.records import Shard
from distributor.checkpoint.shards import MeasuredFile
from distributor.checkpoint.training_state import local_part


class Planner:
    """Agrees with the other ranks which tensors this rank writes to a checkpoint.

    A rank sends its plan to rank 0 only if it has changed since the rank's previous save. Rank 0 then answers all
    ranks. If no plan has changed, all ranks write the same tensors as before.
    """

    def __init__(self, exchange: Exchange, seat: Seat = Seat()) -> None:  # noqa: B008  # it is immutable
        self._exchange = exchange
        self._seat = seat
        self._sent = b""  # the plan that this rank last sent to rank 0
        self._all: list[tuple[bytes, Seat]] = [(b"", Seat())] * exchange.world_size  # on rank 0, of all ranks
        self._final: SavePlan | None = None
        self._left_out: frozenset[str] = frozenset()
        self._omitted: frozenset[str] = frozenset()
        self._peer: Seat | None = None
        self._metadata: Any = None  # on rank 0: DCP's metadata of the whole checkpoint

    @property
    def metadata(self) -> Any:
        return self._metadata

    def is_same(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the plan for these tensors is the one that this rank last sent to rank 0."""
        return self._final is not None and _local(tensors) == self._sent

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors of which this rank writes at least a part."""
        assert self._final is not None
        return frozenset(item.index.fqn for item in self._final.items)

    @property
    def left_out(self) -> frozenset[str]:
        """The names of tensors that a lower rank of this node keeps in memory for this rank."""
        return self._left_out

    @property
    def omitted(self) -> frozenset[str]:
        """The names of tensors that the copy on another node lacks, because a lower rank has them in full."""
        return self._omitted

    @property
    def peer(self) -> Seat | None:
        """How to reach the node that keeps the copy of this rank's state; ``None`` if there is no other node."""
        return self._peer

    def settle(self, key: str, tensors: Mapping[str, torch.Tensor], samples: Mapping[str, str], what: str) -> SavePlan:
        """Exchange plans with the other ranks, and return what this rank writes.

        ``samples`` are digests of some parameter values by the name of the module's entry, the same on all ranks that
        have it. The errors are those of :meth:`Exchange.gather`; ranks with different tensors of one name get a
        ConfigurationError.
        """
        key, own = f"{key}/1", _local(tensors)
        value = b"" if own == self._sent else pickles.dumps((own, samples, astuple(self._seat)))
        self._sent = b""  # if the exchange fails, it is not known which plan rank 0 has
        plans = self._exchange.gather(key, value, what)
        finals: list[bytes] = []
        if self._exchange.rank == 0:
            try:
                finals = self._plan([pickles.loads(each) if each else None for each in plans])
            except ValueError as error:
                self._exchange.refuse(key, f"{what}: {error}")
        final = self._exchange.share(key, finals, what)
        self._sent = own
        if final:
            self._final, self._left_out, self._omitted, peer = pickles.loads(final)
            self._peer = None if peer is None else Seat(*peer)
        assert self._final is not None
        return self._final

    def _plan(self, sent: Sequence[tuple[bytes, Mapping[str, str], tuple[Any, ...]] | None]) -> list[bytes]:
        """On rank 0, return each rank's final plan, left_out, omitted and peer; empty texts if no plan has changed."""
        if not any(sent):
            return [b""] * len(sent)
        _compare([each[1] for each in sent if each is not None])
        same = dict[bytes, bytes]()  # under DDP, the plans of all ranks: kept and read once
        self._all = [
            known if new is None else (same.setdefault(new[0], new[0]), Seat(*new[2]))
            for new, known in zip(sent, self._all, strict=True)
        ]
        loaded = {plan: pickles.loads(plan) for plan in {plan for plan, _ in self._all}}
        plans, seats = [loaded[plan] for plan, _ in self._all], [seat for _, seat in self._all]
        left_out, omitted = _known_elsewhere(plans, [seat.folder for seat in seats])
        _compare_sizes(plans)
        finals, self._metadata = _planner().create_global_plan(plans)
        finals = FileSystemWriter("").prepare_global_plan(finals)
        peers = [None if (peer := peer_of(seat, seats)) is None else astuple(peer) for seat in seats]
        return [pickles.dumps(each) for each in zip(finals, left_out, omitted, peers, strict=True)]


def _compare(samples: Sequence[Mapping[str, str]]) -> None:
    """Refuse digests that differ between ranks whose states have a module of the same name."""
    seen: dict[str, str] = {}
    for own in samples:
        for entry, digest in own.items():
            if seen.setdefault(entry, digest) != digest:
                raise ValueError(
                    f"the parameters of {entry!r} differ between ranks, and only one rank's would be saved: wrap the "
                    f"model in DistributedDataParallel, or name the entry by rank: {{f'{entry}-{{rank()}}': ...}}"
                )


def _compare_sizes(plans: Sequence[SavePlan]) -> None:
    seen: dict[str, Any] = {}
    for plan in plans:
        for item in plan.items:
            assert item.tensor_data is not None
            about = (item.tensor_data.size, item.tensor_data.properties.dtype)
            if seen.setdefault(item.index.fqn, about) != about:
                raise ValueError(
                    f"the tensor {item.index.fqn!r} has different sizes or types on different ranks: if each rank has "
                    "a model of its own, put the rank into the name of its entry in state: {f'model-{rank()}': model}"
                )


def _known_elsewhere(
    plans: Sequence[SavePlan], folders: Sequence[str]
) -> tuple[list[frozenset[str]], list[frozenset[str]]]:
    """For each rank, name the tensors that a lower rank also keeps in memory in full: on the same, and on any node."""
    seen: dict[str, set[str]] = {}
    anywhere: set[str] = set()
    here, everywhere = [], []
    for plan, folder in zip(plans, folders, strict=True):
        own = {item.index.fqn for item in plan.items if item.type is WriteItemType.TENSOR and folder}
        known = seen.setdefault(folder, set())
        here.append(frozenset(own & known))
        everywhere.append(frozenset(own & anywhere))
        known |= own
        anywhere |= own
    return here, everywhere


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)


def _local(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a plan by which a rank writes everything that it has of the given tensors."""
    planner = _planner()
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    plan = planner.create_local_plan()
    for item in plan.items:
        assert item.tensor_data is not None
        item.tensor_data.properties.pin_memory = False  # else plans for tensors and their pinned copies would differ
    return pickles.dumps(plan)


def write(plan: SavePlan, tensors: Mapping[str, torch.Tensor], folder: Path) -> tuple[list[Shard], bytes]:
    """Write the tensors of a plan. Return the files, and where tensors are in them, for :func:`write_metadata`."""
    planner = _planner()
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    planner.finish_plan(plan)
    # 0 turns off torch's loader for tensors on GPUs, which synchronizes with GPU 0: these are on the CPU.
    writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    writer.fs = files = _MeasuredFiles(folder)
    options: Any = config  # torch adds patch to this module
    with options.patch("save.compute_crc32", False):  # torch computes them with the lock; files have checksums
        results = pickles.dumps(writer.write_data(plan, planner).value())
    return files.shards, results


class _MeasuredFiles(FileSystem):
    """A file system with which torch writes a checkpoint. It computes the size and checksum of each new file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.shards: list[Shard] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with MeasuredFile(Path(path), os.path.relpath(path, self._folder)) as file:
            try:
                yield cast("io.IOBase", file)
            except Exception:  # torch's error does not say why
                if file.error is None:
                    raise
                raise file.error from None
        self.shards.append(file.shard)


def write_metadata(metadata: Any, results: Sequence[bytes], folder: Path) -> None:
    """Write ``.metadata``, the file in which DCP describes a checkpoint."""
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, [pickles.loads(each) for each in results])


class PlannedCopies:
    """Copies of tensors in the CPU's memory, which stays allocated for the next save."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._pinned: Pinned | None = None  # one block for all copies of tensors on GPUs

    def of(
        self, tensors: Mapping[str, torch.Tensor], names: Set[str], room: Mapping[str, torch.Tensor], *, stay: bool
    ) -> dict[str, torch.Tensor]:
        """Copy the named tensors, if possible into ``room``. All others become stand-ins without data.

        Tensors that ``stay`` as they are until they are written need no copy if they are in the CPU's memory.
        """
        self._pin({name: local_part(tensors[name]) for name in tensors if name in names and name not in room})
        copies = {
            name: _empty(tensor)
            if name not in names
            else tensor
            if stay and name not in room and tensor.device.type == "cpu"
            else self._copy(name, tensor, room.get(name))
            for name, tensor in tensors.items()
        }
        self._kept = {
            name: kept for name, kept in self._kept.items() if name in tensors and name in names and name not in room
        }
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _copy(self, name: str, tensor: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
        source = local_part(tensor)
        if room is not None:
            room.copy_(source, non_blocking=source.is_cuda)
            return _like(tensor, room)
        kept = self._kept.get(name)
        if kept is None or not _fits(kept, source):
            kept = self._kept[name] = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        kept.copy_(source, non_blocking=source.is_cuda)
        return _like(tensor, kept)

    def _pin(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Make pinned memory for copies of tensors on GPUs, unless it is there: once, since pinning takes long."""
        moved = {name: source for name, source in sources.items() if source.is_cuda}
        if all(name in self._kept and _fits(self._kept[name], source) for name, source in moved.items()):
            return
        if self._pinned is not None:
            self._pinned.release()
        self._pinned, self._kept = None, {name: kept for name, kept in self._kept.items() if name not in moved}
        ends = list(accumulate(padded(source.nbytes) for source in moved.values()))
        block = torch.empty(ends[-1], dtype=torch.uint8)
        self._pinned = Pinned(block)
        for (name, source), begin in zip(moved.items(), [0, *ends]):
            self._kept[name] = block[begin : begin + source.nbytes].view(source.dtype).view(source.shape)


def _fits(kept: torch.Tensor, source: torch.Tensor) -> bool:
    return kept.shape == source.shape and kept.dtype == source.dtype


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same size and type that takes no memory."""
    source = local_part(tensor)
    return _like(tensor, torch.empty(source.shape, dtype=source.dtype, device="meta"))


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is split over the ranks like ``tensor``, but has ``local`` as this rank's part."""
    if not isinstance(tensor, DTensor):
        return local
    make: Any = DTensor  # DTensor.from_local would move the part to the mesh's device
    return cast("torch.Tensor", make(local, tensor._spec, requires_grad=False))
