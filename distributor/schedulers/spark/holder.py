"""Brings the reports of a failed run's tasks to the driver: as rows in an accumulator, before the job is cancelled.

Runs in a barrier task's Python worker. It uses only the standard library, and is pickled by value.

When a run fails, its Spark job must fail too, but not by an exception in a task: Spark would run the stage again. So
one task, the *holder*, keeps running while the others send their rows to the driver through an accumulator. Spark
delivers the rows of a task as the task ends. Then the driver cancels the job. Tasks do not wait for one another in
``allGather``, because killing a task that waits there ends its executor, too (Spark 4.3).
"""

from __future__ import annotations

import hmac
import pickle
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from distributor.channel.lines import Endpoint
from distributor.schedulers.spark.shipment import Shipment

#: A leader sends this to its siblings when the run has failed; the courier sends it to the holder when it has the rows.
_FAILED = _RECEIVED = b"1"

#: Number of seconds that another task may take to answer.
_PEER_TIMEOUT = 5.0

#: Number of seconds between the holder's checks that the driver is still there.
_HOLD_INTERVAL = 0.2

#: Maximum number of bytes that a task accepts from another task.
_MAX_ROWS = 64 << 20

_DIGEST_BYTES = 32


def choose_roles(facts: list[dict[str, Any]], key: bytes | None) -> tuple[int, int | None] | None:
    """Return the holder of a failed run and, if the holder has rows, the courier: the task that sends them.

    If any executor has several tasks, the holder is a *sibling*: a task that does not lead its executor, and so has no
    rows. Otherwise, partition 0 is the holder, and partition 1 the courier: it leads a node without the rendezvous
    store, so its listening socket is free.
    """
    leaders = {fact["executor"]: fact["partition"] for fact in reversed(facts)}
    siblings = [fact["partition"] for fact in facts if leaders[fact["executor"]] != fact["partition"]]
    if siblings:
        return siblings[-1], None
    return (0, 1) if key is not None and len(facts) > 1 else None


def hand_over(
    shipment: Shipment,
    facts: list[dict[str, Any]],
    roles: tuple[int, int | None],
    partition: int,
    rows: list[bytes],
    listener: socket.socket,
    failed_rows: Any,
) -> list[bytes]:
    """Send a task's rows of a failed run to the driver. Return the rows that the task must yield itself."""
    holder, courier = roles
    key, patience = shipment["key"] or b"", shipment["patience"]
    if partition == holder:
        if courier is None or _send_rows(facts[courier], key, rows, patience):
            _hold(shipment["endpoint"], patience)
        return rows
    if partition == courier:
        taken = _take_rows(listener, key, patience)
        if taken is None:
            return rows
        rows = [*rows, *taken]
    failed_rows.add(((partition, tuple(rows)),))
    return []


def _send_rows(to: Mapping[str, Any], key: bytes, rows: list[bytes], timeout: float) -> bool:
    """Send rows to the courier, which may still wait for its ranks to end. Return whether it has taken them."""
    data = pickle.dumps(rows)
    try:
        with socket.create_connection((to["address"], to["port"]), _PEER_TIMEOUT) as line:
            line.sendall(hmac.digest(key, data, "sha256") + data)
            line.shutdown(socket.SHUT_WR)
            line.settimeout(timeout)
            return line.recv(1) == _RECEIVED
    except OSError:
        return False


def _take_rows(listener: socket.socket, key: bytes, timeout: float) -> list[bytes] | None:
    """Receive the holder's rows; ``None`` if they do not come in time. The sender must prove that it has the key."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError):
            listener.settimeout(left)
            line, _ = listener.accept()
            with line:
                line.settimeout(_PEER_TIMEOUT)
                with line.makefile("rb") as file:
                    digest, data = file.read(_DIGEST_BYTES), file.read(_MAX_ROWS)
                if hmac.compare_digest(digest, hmac.digest(key, data, "sha256")):
                    line.sendall(_RECEIVED)
                    rows: list[bytes] = pickle.loads(data)
                    return rows
    return None


def _hold(endpoint: Endpoint | None, timeout: float) -> None:
    """Keep this task from ending until the driver has cancelled the job and closed the channel's port."""
    reached = False
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        try:
            if endpoint is not None:
                socket.create_connection(endpoint[:2], _PEER_TIMEOUT).close()
                reached = True
        except ConnectionRefusedError:
            if reached:
                return
        except OSError:  # not reachable from here: Spark ends this worker soon after the job
            pass
        time.sleep(min(left, _HOLD_INTERVAL))


def tell_siblings(hold: socket.socket, count: int) -> None:
    """Tell the sibling tasks, which wait for this task to end, that the run has failed."""
    hold.settimeout(_PEER_TIMEOUT)
    for _ in range(count):
        with suppress(OSError):  # a sibling is gone: then Spark ends the stage
            sibling, _ = hold.accept()
            with sibling:
                sibling.sendall(_FAILED)


def await_end(held: str) -> bool:
    """Keep this task's slot until the leader's task ends for any reason. Return whether the run has failed."""
    with socket.socket(socket.AF_UNIX) as waiting:
        try:
            waiting.connect("\0" + held)
            return waiting.recv(1) == _FAILED
        except OSError:  # the leader has already ended
            return False
