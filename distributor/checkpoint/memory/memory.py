"""Keeps the newest saved states of a node's ranks in shared memory, in files that outlive the ranks.

Each rank has two slots, which are files, and saves to them in turn. While one is written, the other stays complete. A
slot is valid once it has a record, a second file that names the slot's checkpoint and tensors.

If several ranks of a node have the same tensor in full, such as a weight under DDP, only the lowest of these ranks
keeps it. To find such tensors when loading, a rank reads the records of all ranks of its node.

A rank begins a save only when all ranks have done their parts of the previous one, so no rank is two saves ahead of
another. Once all ranks have their first state, there is therefore always a checkpoint that all ranks have in memory,
unless memory was too small for a state, a rank has revoked one, or a save has failed in a rank that then goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from distributor.checkpoint.context import Session
from distributor.checkpoint.memory.replica_client import Peers
from distributor.checkpoint.memory.states import Generation, InMemory, MemoryOffer, Piece, Seat, oldest, padded
from distributor.checkpoint.pinned import Pinned
from distributor.checkpoint.training_state import local_part
from distributor.machine import state_folders
from distributor.text import notices
from distributor.values import codec
from distributor.values.checkpoints import SharedMemory

_log = notices.logger

#: Tensors in one block of memory, by name.
Room = dict[str, torch.Tensor]


def kept_by(session: Session) -> Memory | None:
    """Return the states that this rank keeps in shared memory; ``None`` without ``Checkpoints(memory=True)``."""
    about = session.settings.memory
    if session.memory is None and about is not None:
        peers = Peers(about.folder, session) if about.replicate else None
        session.memory = Memory(about, session.exchange.rank, session.exchange.world_size, peers)
    return session.memory


class Memory:
    """The states that one rank keeps in shared memory."""

    def __init__(self, about: SharedMemory, rank: int, world_size: int, peers: Peers | None = None) -> None:
        self.peers = peers  # None if other nodes keep no copies
        self._about = about
        self._folder = Path(about.folder)
        self._rank = rank
        self._world_size = world_size
        self._slots = [_Slot(self._folder / f"{rank}-{number}") for number in range(2)]
        self._open: tuple[_Slot, Generation] | None = None
        self._loaded: str | None = None
        self._warned: set[str] = set()

    def begin(self, checkpoint: str, step: int, tensors: Mapping[str, torch.Tensor], others: Iterable[str]) -> Room:
        """Begin to overwrite a slot. Return the memory for each tensor, by name; none if there is too little."""
        number = oldest([slot.generation for slot in self._slots], self._loaded)
        self._loaded = None  # the next save may overwrite it, since all ranks have a newer state by then
        slot, pieces, size = self._slots[number], *_layout(tensors)
        self._open = None
        slot.clear()
        try:
            room = slot.prepare(pieces, size, self._about.limit)
            if any(tensor.is_cuda for tensor in tensors.values()):
                slot.pin()
        except OSError as error:
            for each in self._slots:  # frees the memory of the other slot's state, which becomes outdated
                each.remove()
            self._warn(error)
            return {}
        self._open = slot, Generation(checkpoint, step, self._world_size, pieces, tuple(others))
        return room

    def seal(self, objects: bytes) -> None:
        """Make the state that :meth:`begin` started valid. Its tensors must be in the slot."""
        if self._open is None:
            return
        (slot, generation), self._open = self._open, None
        try:
            slot.seal(generation, objects)
        except OSError as error:
            self._warn(error)

    def revoke(self, checkpoint: str) -> None:
        """Invalidate the state that this rank keeps of a checkpoint, so that it is not loaded."""
        for slot in self._slots:
            if slot.holds(checkpoint):
                slot.clear()

    def replicate(self, checkpoint: str, objects: bytes, omitted: Iterable[str], peer: Seat | None) -> None:
        """Send this rank's state, without the omitted tensors, to the node that keeps a copy of it."""
        kept = next((slot for slot in self._slots if slot.holds(checkpoint)), None)
        if self.peers is None or kept is None or kept.generation is None or (peer is None and self._rank > 0):
            return
        generation, parts = kept.generation.without(omitted)
        try:
            self.peers.send(peer, kept.path, codec.pack(generation), objects, parts)
        except OSError as error:
            self._warn(error, "Checkpoints(replicate=True): no copy is kept")

    def held(self) -> list[Generation]:
        """Return the states that this rank can load completely from the memory of its own node."""
        found = []
        for generation in (slot.generation for slot in self._slots):
            if generation is not None and generation.world_size == self._world_size:
                here = {
                    piece.name
                    for _, other in self._of(generation.checkpoint)
                    for piece in other.pieces
                    if piece.is_whole
                }
                if here.issuperset(generation.others):
                    found.append(generation)
        return found

    def offer(self) -> MemoryOffer:
        """Return what this rank tells rank 0. Usually, it names the states that it can load from its own node.

        If nodes keep copies, restarted ranks may load states from other nodes. So they tell where they are, and local
        rank 0 of each node which states its machine has.
        """
        if self.peers is None or not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            return MemoryOffer(tuple(generation.checkpoint for generation in self.held()))
        speaks = int(os.environ.get("LOCAL_RANK", 0)) == 0
        return MemoryOffer(seat=self.peers.seat, holdings=tuple(self.peers.holdings()) if speaks else ())

    def read(self, chosen: InMemory) -> Held:
        """Return this rank's state; without sources, from the memory of its own node."""
        if chosen.sources is None:
            return self._read_here(chosen.checkpoint)
        assert self.peers is not None
        held, elsewhere = Held(), {seat.node: seat for seat in chosen.seats if seat.node != self.peers.seat.node}
        for source in chosen.sources:
            seat, slot = elsewhere.get(source.node), _Slot(Path(source.path))
            if source.objects is not None:
                size = source.objects
                held.objects = slot.objects.read_bytes() if seat is None else self.peers.objects(seat, source, size)
            if seat is None:
                views = slot.views(source.pieces)
            else:
                data, pieces = self.peers.tensors(seat, source)
                views = _views_in(torch.frombuffer(data or bytearray(1), dtype=torch.uint8), pieces)
            held.add(views, source.pieces, views.keys() - held.tensors.keys())
        if any(slot.holds(chosen.checkpoint) for slot in self._slots):
            self._loaded = chosen.checkpoint
        return held

    def _read_here(self, checkpoint: str) -> Held:
        held = Held()
        for slot, generation in self._of(checkpoint):
            if slot.path.name.partition("-")[0] == str(self._rank):
                self._loaded, held.objects = checkpoint, slot.objects.read_bytes()
                kept = {piece.name for piece in generation.pieces}
            else:
                kept = {piece.name for piece in generation.pieces if piece.is_whole} - held.tensors.keys()
            held.add(slot.views(generation.pieces), generation.pieces, kept)
        return held

    def _of(self, checkpoint: str) -> Iterator[tuple[_Slot, Generation]]:
        """Yield the slots in which this node's ranks keep their states of a checkpoint, this rank's first."""
        own = {slot.path for slot in self._slots}
        paths = sorted(path.with_suffix("") for path in self._folder.glob("*.record"))
        for path in sorted(paths, key=lambda each: each not in own):
            slot = _Slot(path)
            if slot.generation is not None and slot.holds(checkpoint):
                yield slot, slot.generation

    def _warn(self, error: OSError, what: str = "Checkpoints(memory=True): nothing is kept in memory") -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s: %s", what, error)


@dataclass
class Held:
    """One rank's state of a checkpoint, as it was read from the memory of one or more nodes."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # this rank's parts
    sizes: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    objects: bytes = b""  # the content of the file of objects

    def add(self, views: Room, pieces: Iterable[Piece], names: Iterable[str]) -> None:
        chosen = set(names)
        for piece in pieces:
            if piece.name in chosen:
                self.tensors[piece.name] = views[piece.name]
                about = TensorProperties(dtype=_dtype_of(piece))
                self.sizes[piece.name] = TensorStorageMetadata(about, torch.Size(piece.whole), [])


class _Slot:
    """The files of one state: its tensors, its objects, and its record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.objects = path.with_suffix(".objects")
        self._record = path.with_suffix(".record")
        self._mapped: tuple[tuple[Piece, ...], Room] | None = None
        self._pinned: Pinned | None = None
        #: ``None`` without a complete state. It is read once; later, only the rank that writes the slot updates it.
        self.generation: Generation | None = None
        with suppress(FileNotFoundError):
            self.generation = codec.read(Generation, self._record.read_bytes())

    def holds(self, checkpoint: str) -> bool:
        return self.generation is not None and self.generation.checkpoint == checkpoint

    def clear(self) -> None:
        """Make the state invalid. The file of tensors stays, for the next state."""
        self._record.unlink(missing_ok=True)
        self.generation = None

    def pin(self) -> None:
        """Pin the memory that :meth:`prepare` has mapped, unless it is pinned."""
        if self._pinned is None and self._mapped is not None and self._mapped[1]:
            self._pinned = Pinned(next(iter(self._mapped[1].values())))

    def remove(self) -> None:
        self.clear()
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None
        self._mapped = None
        self.path.unlink(missing_ok=True)

    def prepare(self, pieces: tuple[Piece, ...], size: int, limit: int) -> Room:
        """Return the memory for a new state's tensors: the last one's if this process wrote it and the layout fits."""
        if self._mapped is not None and self._mapped[0] == pieces:
            return self._mapped[1]
        self.remove()
        state_folders.create_file(self.path, size, limit)
        self._mapped = pieces, self.views(pieces)
        return self._mapped[1]

    def views(self, pieces: tuple[Piece, ...]) -> Room:
        """Return the tensors in the file, by name, without copying them."""
        size = os.stat(self.path).st_size
        return _views_in(torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8), pieces)

    def seal(self, generation: Generation, objects: bytes) -> None:
        """Write a state's objects and then its record, which makes it valid. Its tensors must be there."""
        state_folders.write_beside(self.path, objects, codec.pack(generation))
        self.generation = generation


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Piece, ...], int]:
    """Return where this rank's part of each tensor goes in a new file, and the size of the file."""
    pieces, end = [], 0
    for name, tensor in tensors.items():
        local = local_part(tensor)
        pieces.append(
            Piece(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(local.shape),
                tuple(tensor.shape),
                not isinstance(tensor, DTensor),
                end,
                local.numel() * local.element_size(),
            )
        )
        end += padded(pieces[-1].size)
    return tuple(pieces), max(end, padded(1))


def _views_in(block: torch.Tensor, pieces: Iterable[Piece]) -> Room:
    """Return the tensors in a block of bytes, without copying them: they use the block's memory."""
    return {
        piece.name: block[piece.offset : piece.offset + piece.size].view(_dtype_of(piece)).view(piece.shape)
        for piece in pieces
    }


def _dtype_of(piece: Piece) -> torch.dtype:
    """Return the torch type of a piece."""
    dtype = getattr(torch, piece.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
