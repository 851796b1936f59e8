"""A rank's connections to the agents of other nodes, which keep copies of ranks' states in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from distributor.channel import peers
from distributor.channel.connections import Endpoint
from distributor.checkpoint.context import Session
from distributor.checkpoint.memory.states import Generation, Holding, Piece, Seat, Source, extract
from distributor.machine import state_folders
from distributor.values import codec
from distributor.values.checkpoints import PEERS, PeerAddress


class Peers:
    """Sends one rank's state to another node, and reads states from other nodes."""

    def __init__(self, folder: str, session: Session) -> None:
        own = codec.read(PeerAddress, Path(folder, PEERS).read_bytes())
        self._certificate = own.certificate
        self._token = bytes.fromhex(own.token)
        self._run_id = session.origin.rpartition("-")[0]
        node = int(os.environ.get("GROUP_RANK", 0))
        self.seat = Seat(folder, node, session.settings.hosts.get(node, ""), own.address, own.port)

    def _at(self, seat: Seat) -> Endpoint:
        return seat.address, seat.port, self._certificate, self._token

    def send(
        self, peer: Seat | None, path: Path, record: bytes, objects: bytes, parts: Sequence[tuple[int, int]]
    ) -> None:
        """Send this rank's record, objects, and some parts of its file of tensors to another node."""
        if peer is None:
            raise OSError("this run has only one node")
        try:
            peers.send_copy(self._at(peer), path.name, record, objects, str(path), parts)
        except (OSError, ValueError) as error:
            raise OSError(f"the node on {peer.host} does not accept the state of this rank: {error}") from None

    def holdings(self) -> list[Holding]:
        """Return the states that nodes of this run, also of earlier jobs, keep in memory on this machine."""
        found = []
        for folder in state_folders.find(self._run_id):
            for record in sorted(Path(folder.path).glob("*.record")):
                path, rank = record.with_suffix(""), int(record.name.partition("-")[0])
                try:
                    size = path.with_suffix(".objects").stat().st_size
                    found.append(
                        Holding(self.seat.node, rank, str(path), size, codec.read(Generation, record.read_bytes()))
                    )
                except FileNotFoundError:  # the process that kept the state has just ended
                    continue
        return found

    def objects(self, seat: Seat, source: Source, size: int) -> bytes:
        """Read the file of objects beside a source on another node."""
        return bytes(self._recall(seat, str(Path(source.path).with_suffix(".objects")), [(0, size)]))

    def tensors(self, seat: Seat, source: Source) -> tuple[bytearray, tuple[Piece, ...]]:
        """Read a source on another node, and return its bytes, and where each tensor is in them."""
        pieces, parts = extract(source.pieces)
        return self._recall(seat, source.path, parts), pieces

    def _recall(self, seat: Seat, path: str, parts: Sequence[tuple[int, int]]) -> bytearray:
        try:
            return peers.recall(self._at(seat), path, parts)
        except (OSError, ValueError) as error:
            raise OSError(
                f"the node on {seat.host} does not send the saved state that it keeps in memory: {error}"
            ) from None
