"""Brings the reports of a failed run's tasks to the driver: as rows in an accumulator, before the job is cancelled.

Runs in a barrier task's Python worker. It uses only the standard library, and is pickled by value.

When a run fails, its Spark job must fail too, but not by an exception in a task: Spark would run the stage again. So
one task, the *holder*, keeps running while the others send their rows to the driver through an accumulator. Spark
delivers the rows of a task as the task ends. If the holder has rows too, it passes them to another task, the *courier*.
Then the driver cancels the job. Tasks do not wait for one another in ``allGather``, because killing a task that waits
there ends its executor, too (Spark 4.3).

The *leader* of an executor is the task that runs its agent. The executor's other tasks are the leader's *siblings*.
"""

from __future__ import annotations

import hmac
import pickle
import select
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

#: Number of seconds between a waiting task's checks that the job goes on.
_INTERVAL = 0.2

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


class _Job:
    """Lets a task that waits for other tasks notice that the job has ended.

    The driver closes the channel's port after it has cancelled the job, or after Spark has ended it. So the waiting
    task checks this port. Spark kills the task's Python worker up to four seconds later
    (``PythonRunner.MonitorThread``); until then, the task would keep its slot, although the next job may need it.

    Args:
        endpoint: the channel's port.
        reached: whether this task has already reached the driver at the port.
        patience: number of seconds to wait at most.
    """

    def __init__(self, endpoint: Endpoint | None, reached: bool, patience: float) -> None:
        self._endpoint = endpoint
        self._reached = reached
        self._deadline = time.monotonic() + patience

    def goes_on(self) -> bool:
        """Return whether the task still has something to wait for."""
        if time.monotonic() > self._deadline:
            return False
        try:
            if self._endpoint is not None:
                socket.create_connection(self._endpoint[:2], _PEER_TIMEOUT).close()
                self._reached = True
        except ConnectionRefusedError:
            return not self._reached
        except OSError:  # not reachable from here: Spark ends this worker soon after the job
            pass
        return True

    def await_end(self) -> None:
        """Keep this task from ending before the job does."""
        while self.goes_on():
            time.sleep(_INTERVAL)

    def await_data(self, line: socket.socket) -> bool:
        """Wait until a socket has data or a connection to accept. Return ``False`` if the job ends first."""
        poll = select.poll()
        poll.register(line, select.POLLIN)
        while not (found := poll.poll(_INTERVAL * 1000)) and self.goes_on():
            pass
        return bool(found)


def hand_over(
    shipment: Shipment,
    facts: list[dict[str, Any]],
    roles: tuple[int, int | None],
    partition: int,
    rows: list[bytes],
    listener: socket.socket,
    failed_rows: Any,
    reached: bool,
) -> list[bytes]:
    """Send a task's rows of a failed run to the driver. Return the rows that the task must yield itself.

    Args:
        shipment: the task's input.
        facts: the facts of all tasks.
        roles: the holder and the courier.
        partition: this task's partition.
        rows: this task's rows.
        listener: this task's listening socket.
        failed_rows: the accumulator.
        reached: whether this task has reached the driver.
    """
    holder, courier = roles
    key = shipment["key"] or b""
    job = _Job(shipment["endpoint"], reached, shipment["patience"])
    if partition == holder:
        if courier is None or _send_rows(facts[courier], key, rows, job):
            job.await_end()
        return rows
    if partition == courier:
        taken = _take_rows(listener, key, job)
        if taken is None:
            return rows
        rows = [*rows, *taken]
    failed_rows.add(((partition, tuple(rows)),))
    return []


def _send_rows(to: Mapping[str, Any], key: bytes, rows: list[bytes], job: _Job) -> bool:
    """Send rows to the courier, which may still wait for its ranks to end. Return whether it has taken them."""
    data = pickle.dumps(rows)
    try:
        with socket.create_connection((to["address"], to["port"]), _PEER_TIMEOUT) as line:
            line.sendall(hmac.digest(key, data, "sha256") + data)
            line.shutdown(socket.SHUT_WR)
            return job.await_data(line) and line.recv(1) == _RECEIVED
    except OSError:
        return False


def _take_rows(listener: socket.socket, key: bytes, job: _Job) -> list[bytes] | None:
    """Receive the holder's rows; ``None`` if they do not come in time. The sender must prove that it has the key."""
    listener.settimeout(_PEER_TIMEOUT)
    while job.await_data(listener):
        with suppress(OSError):
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
