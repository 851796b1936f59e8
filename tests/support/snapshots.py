"""Snapshots of a run of four ranks on two nodes."""

from __future__ import annotations

from distributor.display.snapshot import Snapshot
from distributor.errors import TrainingError
from distributor.values.job import Status
from distributor.values.outcome import Failure
from distributor.values.placement import Node, Placement

PLACEMENT = Placement(
    (
        Node(0, "a", "host-a", "10.0.0.1", 1, 0, 0, 3, ("0", "1", "2")),
        Node(1, "b", "host-<b>", "10.0.0.2", 1, 3, 3, 1, ("0",)),
    )
)

FAILURE = Failure(3, 0, "host-<b>", "ValueError", "ValueError: <lr>", "Traceback ...\nValueError: <lr>")

ERROR = TrainingError("rank 3 on host-<b> failed: ValueError: <lr>\n\nTraceback ...", [FAILURE])


def at(status: Status, **known: object) -> Snapshot:
    return Snapshot("3f2a", "train", 4, status, **known)  # type: ignore[arg-type]
