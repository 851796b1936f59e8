"""Rows: the ``bytes`` in which tasks send reports and results to the driver through Spark."""

from __future__ import annotations

import hmac
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator

from distributor.channel.result_receiver import Arrived
from distributor.errors import ResultError
from distributor.text.wording import no_temporary_folder
from distributor.values import codec
from distributor.values.files import Brought, FileHead
from distributor.values.messages import UnfitNode
from distributor.values.outcome import Collected, Log, NodeReport

#: The function of a barrier task, which yields rows.
Task = Callable[[], Iterator[bytes]]

#: The row of a task that has ended at once because an executor has more ranks than it may host.
CROWDED = b"C"

OUTPUT = struct.Struct("!IBQ")  # rank, stream, offset
DIGEST = struct.Struct("!IQ32s")  # rank, size, sha256


def sort(pieces: Iterable[bytes], arrived: Callable[[int], Arrived | None] = lambda rank: None) -> Collected:
    """Sort the rows of all tasks by kind; those of one task must be in the order in which it sent them.

    ``arrived`` returns a rank's value if it has come over the channel. ResultError: it is not the one announced.
    """
    reports, lost, logs = [], [], []
    values: dict[int, list[bytes | memoryview]] = {}
    files: dict[bytes, list[bytes]] = {}
    for piece in pieces:
        kind, body = piece[:1], memoryview(piece)[1:]
        if kind == b"R":
            reports.append(pickle.loads(body))
        elif kind == b"V":
            (rank,) = struct.unpack_from("!I", body)
            values.setdefault(rank, []).append(body[4:])
        elif kind == b"D":
            rank, size, digest = DIGEST.unpack(body)
            values[rank] = [_announced(rank, size, digest, arrived(rank))]
        elif kind == b"G":
            rank, stream, offset = OUTPUT.unpack_from(body)
            logs.append(Log(rank, stream, offset, bytes(body[OUTPUT.size :])))
        elif kind == b"F":
            (length,) = struct.unpack_from("!I", body)
            files.setdefault(bytes(body[4 : 4 + length]), []).append(bytes(body[4 + length :]))
        elif kind == b"E":
            unfit = codec.read(UnfitNode, bytes(body))
            error = "StartError", no_temporary_folder(unfit.host, unfit.why)
            reports.append(NodeReport(-1, unfit.host, error=error))
        else:
            lost.append(bytes(body).decode())
    heads = {codec.read(FileHead, head): pieces for head, pieces in files.items()}
    brought = tuple(Brought(head.node, head.entry, pieces, head.uploaded) for head, pieces in heads.items())
    return Collected(tuple(reports), values, tuple(lost), tuple(logs), files=brought)


def _announced(rank: int, size: int, digest: bytes, arrived: Arrived | None) -> memoryview:
    """Return a value that came over the channel, or raise ResultError if its node announced another."""
    if arrived is not None and len(arrived.data) == size and hmac.compare_digest(arrived.digest, digest):
        return arrived.data
    came = "nothing" if arrived is None else f"{len(arrived.data)} bytes with sha256 {arrived.digest.hex()[:16]}..."
    raise ResultError(
        f"the return value of rank {rank} was not unpickled: its node announced {size} bytes with sha256 "
        f"{digest.hex()[:16]}... through Spark, but {came} came over the channel, so the value was lost or changed on "
        "the way. Run again; if that does not help, write a checkpoint to shared storage and return its path"
    )
