"""Brings the reports of a failed run's tasks to the driver in a Spark accumulator, before the Spark job is cancelled.

When a run fails, its Spark job must fail too, but not by an exception in a task: Spark would then end the other tasks
before they could send their reports. So one task, the *holder*, keeps running while the others add their rows to an
accumulator, which Spark delivers as each task ends. The holder passes rows of its own to another task, the *courier*.
Once all rows have arrived, the driver cancels the job. Tasks do not wait in ``allGather``, because killing a task that
waits there may end its executor, too (Spark 4.3).

The *leader* of an executor is the task that runs its agent; the executor's other tasks are the leader's *siblings*.

Runs in a task's Python worker: standard library only, and pickled by value.
"""

from __future__ import annotations

import hmac
import pickle
import select
import socket
import time
from contextlib import suppress
from typing import Any

from distributor.channel.connections import Endpoint
from distributor.schedulers.spark.shipment import Shipment

#: The leader tells its siblings that the run has failed, and the courier tells the holder that it has its rows.
_FAILED = _RECEIVED = b"1"

_PEER_TIMEOUT = 5.0  # seconds that another task may take to answer
_INTERVAL = 0.2  # seconds between checks whether the Spark job still runs
_MAX_ROWS = 64 << 20  # bytes that a task accepts from another
_DIGEST_BYTES = 32


class _Job:
    """Lets a waiting task notice the end of its Spark job, when the driver closes the port at which it listens.

    Otherwise, the task would keep its slot, which the next job may need, until Spark kills its Python worker, up to
    four seconds later (``PythonRunner.MonitorThread``).
    """

    def __init__(self, endpoint: Endpoint | None, reached: bool, patience: float) -> None:
        self._endpoint = endpoint
        self._reached = reached  # whether this task has reached the driver
        self._deadline = time.monotonic() + patience

    def goes_on(self) -> bool:
        """Return whether the job seems to be running, and this task's time is not up."""
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
        """Wait until the Spark job ends."""
        while self.goes_on():
            time.sleep(_INTERVAL)

    def await_data(self, line: socket.socket) -> bool:
        """Wait until a socket has data or a connection. Return ``False`` if the wait is over first."""
        poll = select.poll()
        poll.register(line, select.POLLIN)
        while not (found := poll.poll(_INTERVAL * 1000)) and self.goes_on():
            pass
        return bool(found)


def hand_over(
    shipment: Shipment,
    courier_at: tuple[str, int] | None,
    roles: tuple[int, int | None],
    partition: int,
    rows: list[bytes],
    listener: socket.socket,
    failed_rows: Any,
    reached: bool,
) -> list[bytes]:
    """Add the rows of a failed run's task to the accumulator, and return those that this task must yield to Spark.

    The holder sends its rows to the courier instead, and waits for the end of the job.
    """
    holder, courier = roles
    key = shipment["key"] or b""
    job = _Job(shipment["endpoint"], reached, shipment["patience"])
    if partition == holder:
        if courier_at is None or _send_rows(courier_at, key, rows, job):
            job.await_end()
        return rows
    if partition == courier:
        taken = _take_rows(listener, key, job)
        if taken is None:
            return rows
        rows = [*rows, *taken]
    failed_rows.add(((partition, tuple(rows)),))
    return []


def _send_rows(to: tuple[str, int], key: bytes, rows: list[bytes], job: _Job) -> bool:
    """Send rows to the courier. Return whether it has received them.

    It reads them only once the ranks of its node have ended, so this function waits while the Spark job runs.
    """
    data = pickle.dumps(rows)
    try:
        with socket.create_connection(to, _PEER_TIMEOUT) as line:
            line.sendall(hmac.digest(key, data, "sha256") + data)
            line.shutdown(socket.SHUT_WR)
            return job.await_data(line) and line.recv(1) == _RECEIVED
    except OSError:
        return False


def _take_rows(listener: socket.socket, key: bytes, job: _Job) -> list[bytes] | None:
    """Receive the holder's rows, if a sender proves to have the key; ``None`` if none comes in time."""
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
    """Tell the siblings, which wait for this task to end, that the run has failed."""
    hold.settimeout(_PEER_TIMEOUT)
    for _ in range(count):
        with suppress(OSError):  # the task is gone: then Spark ends the stage
            sibling, _ = hold.accept()
            with sibling:
                sibling.sendall(_FAILED)


def await_end(held: str) -> bool:
    """Wait until the leader has ended, or says that the run has failed. Return whether it has said so.

    It does not say so if it sends its rows as usual. The slot that this task keeps is for the run's CPUs and GPUs.
    """
    with socket.socket(socket.AF_UNIX) as waiting:
        try:
            waiting.connect("\0" + held)
            return waiting.recv(1) == _FAILED
        except OSError:  # that task has already ended
            return False
