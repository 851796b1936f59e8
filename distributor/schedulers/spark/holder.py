"""Brings the reports of a failed run's tasks to the driver in a Spark accumulator, before the Spark job is cancelled.

This module runs in a barrier task's Python worker. Its code uses only the standard library, and is pickled by value.

When a run fails, its Spark job must fail too, but not by an exception in a task: Spark would then end the other tasks
before they could send their reports. So one task, the *holder*, keeps running while the others send their rows (the
``bytes`` of their reports) to the driver through an accumulator. Spark delivers the rows of a task as the task ends. If
the holder has rows too, it passes them to another task, the *courier*. Once all rows have arrived, the driver cancels
the job. Tasks do not wait for one another in ``allGather``, because killing a task that waits there may end its
executor, too (Spark 4.3).

The *leader* of an executor is the task that runs its agent (the process that starts ranks). The executor's other tasks
are the leader's *siblings*.
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

#: The byte that one task sends to another. The task that runs an executor's agent sends it to the executor's other
#: tasks if the run has failed. The courier sends it to the holder once it has received the holder's rows.
_FAILED = _RECEIVED = b"1"

#: Number of seconds that another task may take to answer.
_PEER_TIMEOUT = 5.0

#: Number of seconds between a waiting task's checks of whether its Spark job still runs.
_INTERVAL = 0.2

#: Maximum number of bytes that a task accepts from another task.
_MAX_ROWS = 64 << 20

_DIGEST_BYTES = 32


def choose_roles(facts: list[dict[str, Any]], key: bytes | None) -> tuple[int, int | None] | None:
    """Choose the holder, a task that keeps a failed run's job running, and the courier, which reports for the holder.

    Spark delivers a task's report to the driver only as the task ends. The holder, the task that keeps the Spark job
    running, runs until the driver cancels the job. So it passes its report to another task, the courier, which ends
    earlier.

    If an executor has several tasks, the holder is one that does not run the executor's agent. Such a holder has no
    report to pass on, so no courier is needed. If every executor has one task, the holder is partition 0. It passes its
    report to the courier (partition 1), which receives the report on its own listening socket. Partition 0 cannot be
    the courier, because torch's rendezvous store listens on the socket of partition 0.

    Returns:
        The partitions of the holder (it keeps the job running) and of the courier (it reports for the holder). The
        courier is ``None`` if the holder has no report. The whole result is ``None`` if the holder would have a report
        that no other task could send: there is only one task, or ``key`` is ``None``, which means that tasks must not
        send reports to each other.
    """
    leaders = {fact["executor"]: fact["partition"] for fact in reversed(facts)}
    siblings = [fact["partition"] for fact in facts if leaders[fact["executor"]] != fact["partition"]]
    if siblings:
        return siblings[-1], None
    return (0, 1) if key is not None and len(facts) > 1 else None


class _Job:
    """Lets a task that waits for other tasks notice that the Spark job has ended.

    When the job was cancelled or has ended, the driver closes the port at which it listens for nodes. A task that waits
    for other tasks checks this port, and ends once the port is closed. Without the check, the task would keep its slot,
    which the next job may need, until Spark kills its Python worker, up to four seconds later
    (``PythonRunner.MonitorThread``).

    Args:
        endpoint: the address at which the driver listens; ``None`` if it does not listen.
        reached: whether this task has already reached the driver at ``endpoint``.
        patience: maximum number of seconds that this task waits for other tasks, or for the end of the job.
    """

    def __init__(self, endpoint: Endpoint | None, reached: bool, patience: float) -> None:
        self._endpoint = endpoint
        self._reached = reached
        self._deadline = time.monotonic() + patience

    def goes_on(self) -> bool:
        """Return whether to go on waiting: the job seems to be running, and this task's time limit has not passed."""
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
        """Keep this task from ending before its Spark job does, for as long as the task's time limit allows."""
        while self.goes_on():
            time.sleep(_INTERVAL)

    def await_data(self, line: socket.socket) -> bool:
        """Wait until a socket has data or a connection to accept.

        Return ``False`` if the Spark job ends or this task's time limit passes first.
        """
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
    """Send the rows of a failed run's task (the ``bytes`` of its report) to the driver, in a Spark accumulator.

    The holder (the task that keeps the Spark job running) sends its rows to another task, the courier, which adds them
    to the accumulator. Then the holder waits for the end of the job. Return the rows that this task has not added to
    the accumulator: this task must yield them to Spark.

    Args:
        shipment: the task's input.
        facts: what each task has reported about its node (address, ports, GPUs, ...), by partition.
        roles: the partitions of the holder (it keeps the Spark job running) and of the courier (it adds the holder's
            rows to the accumulator).
        partition: this task's partition.
        rows: the ``bytes`` of this task's report.
        listener: this task's listening socket.
        failed_rows: the Spark accumulator that brings the rows of a failed run to the driver.
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
    """Send rows to the courier, the task that passes them to the driver. Return whether it has received them.

    The courier reads the rows only once the ranks of the courier's node have ended. So this function waits for the
    courier to confirm the rows, as long as the Spark job runs and the task's time limit allows.
    """
    data = pickle.dumps(rows)
    try:
        with socket.create_connection((to["address"], to["port"]), _PEER_TIMEOUT) as line:
            line.sendall(hmac.digest(key, data, "sha256") + data)
            line.shutdown(socket.SHUT_WR)
            return job.await_data(line) and line.recv(1) == _RECEIVED
    except OSError:
        return False


def _take_rows(listener: socket.socket, key: bytes, job: _Job) -> list[bytes] | None:
    """Receive the report of the holder, the task that keeps the Spark job running, as rows (pieces of ``bytes``).

    Rows are accepted only if their sender proves that it has the key. Return ``None`` if no such rows come before the
    Spark job ends or this task's time limit passes.
    """
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
    """Tell the other tasks of this executor, which wait for this task to end, that the run has failed."""
    hold.settimeout(_PEER_TIMEOUT)
    for _ in range(count):
        with suppress(OSError):  # the task is gone: then Spark ends the stage
            sibling, _ = hold.accept()
            with sibling:
                sibling.sendall(_FAILED)


def await_end(held: str) -> bool:
    """Wait until the task that runs this executor's agent has ended, or says that the run has failed.

    Return whether that task has said so. Even if the run has failed, the task does not say so if it sends its rows to
    Spark as usual: on Spark Connect, or if its logs and files are too large for an accumulator.

    This task keeps its slot while it waits, so Spark starts no other task on the CPUs and GPUs of the run.
    """
    with socket.socket(socket.AF_UNIX) as waiting:
        try:
            waiting.connect("\0" + held)
            return waiting.recv(1) == _FAILED
        except OSError:  # that task has already ended
            return False
