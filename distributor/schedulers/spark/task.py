"""The code that runs in a barrier task's Python worker: standard library and pyspark only, pickled by value.

The worker exchanges facts with all other tasks. If its task leads its executor, it runs the agent as a child. Spark
reuses workers, so nothing stays behind: no environment variable is set, no module of this package stays imported.

When a run fails, its Spark job must fail too, but not by an exception in a task: Spark would run the stage again. So
one task, the *holder*, does not end while the others send what the driver must know. They use an accumulator, which
Spark delivers as each task ends. Then the driver cancels the job. Tasks do not wait for one another in ``allGather``:
a task that is killed while it waits there takes its executor with it (Spark 4.3).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypedDict

from distributor.channel import task as exchange
from distributor.hosting.host_node import host_node
from distributor.hosting.report import pieces, rest
from distributor.machine import devices, network, processes, versions
from distributor.schedulers.spark.executor import executor_host, executor_of_this
from distributor.values import messages
from distributor.values.job import Warmth

#: A leader sends this to its siblings when the run has failed; the courier sends it to the holder when it has the rows.
_FAILED = _RECEIVED = b"1"

#: Number of seconds that another task may take to answer.
_PEER_TIMEOUT = 5.0

#: Number of seconds to try to tell the driver which module is being imported. The import goes on meanwhile.
_IMPORTING_TIMEOUT = 1.0

#: Number of seconds between the holder's checks that the driver is still there.
_HOLD_INTERVAL = 0.2

#: Most bytes of logs that a failed node sends by the accumulator, which passes through Spark's scheduler.
_MAX_LOGS = 16 << 20

#: Most bytes that a task accepts from another task.
_MAX_ROWS = 64 << 20

_DIGEST_BYTES = 32


class Shipment(TypedDict):
    """The input of every task: plain values, since this package is not importable in the worker.

    ``parts`` maps parts of the job that travel separately to the names of files that Spark delivers; ``package`` is
    such a name, or the zip itself. ``exchange``: whether facts go over the channel if it can be reached. ``silence``:
    number of seconds after which a driver that does not answer is given up. ``warmth``: what the job asks of warm
    processes. ``gpu``: name of the GPU resource or ``None``. ``chunk``: bytes of one piece of a return value.
    ``patience``: number of seconds in which all nodes of a failed run end. ``key`` authenticates the rows that one task
    sends to another; it is ``None`` if rows must not go from one executor to another.
    """

    run_id: str
    job: bytes
    parts: dict[str, str]
    package: bytes | str
    endpoint: exchange.Endpoint | None
    exchange: bool
    silence: float
    warmth: Warmth | None
    driver_host: str
    gpu: str | None
    chunk: int
    patience: float
    key: bytes | None


def run_task(shipment: Shipment, failed_rows: Any = None) -> Iterator[bytes]:
    """Run one barrier task, from its facts to the rows that it returns through Spark.

    Args:
        shipment: the task's input.
        failed_rows: accumulator of ``((partition, rows),)`` for the rows of a failed run; ``None`` to yield them.

    Yields:
        ``b"R" + pickled NodeReport``, ``b"V" + uint32 rank + piece of its pickled value``, ``b"G" + uint32 rank + uint8
        stream + uint64 offset + piece of its output``, or ``b"L" + host`` if the agent died; nothing if another task
        leads this executor, or if the run is stopped before it begins.
    """
    from pyspark import BarrierTaskContext

    times = {"task": time.time()}
    context = BarrierTaskContext.get()
    partition = context.partitionId()
    executors = [task.address for task in context.getTaskInfos()]
    executor = executors[partition]
    # Spark names a task's executor by the address from which it connects to the driver. Other executors fetch from it
    # at the host name that it was started with.
    known_as = executor_host(executor_of_this()) or executor.rpartition(":")[0]
    address = network.node_address(known_as, shipment["driver_host"])
    listener = network.listen(address)
    # The task holds this socket for as long as it lives. An abstract address (unix(7)) cannot be left behind.
    hold = socket.socket(socket.AF_UNIX)
    try:
        held = f"distributor-{shipment['run_id']}-{context.taskAttemptId()}"
        hold.bind("\0" + held)
        hold.listen(1024)
        gpu = shipment["gpu"]
        mine = {
            "partition": partition,
            "executor": executor,
            "host": socket.gethostname(),
            "address": address,
            "port": listener.getsockname()[1],
            "gpus": list(context.resources()[gpu].addresses) if gpu in context.resources() else [],
            "visible_devices": devices.visible_devices(os.environ),
            "cpus": context.cpus(),
            "versions": versions.here(),
            "machine": devices.numbered_by(processes.machine(), os.environ),
        }
        try:
            everyone, reached = exchange.exchange(
                {"partition": partition, "held": held, "facts": mine},
                (_wave(context.stageId(), executors), context.taskAttemptId()),
                shipment["endpoint"] if shipment["exchange"] else None,
                context.allGather,
                shipment["silence"],
            )
        except exchange.StoppedError:
            return
        times["facts"] = time.time()
        facts = [entry["facts"] for entry in everyone]
        leader = next(entry for entry in everyone if entry["facts"]["executor"] == executor)
        roles = _roles(facts, shipment["key"]) if failed_rows is not None else None
        rows: list[bytes] | None
        if leader["held"] == held:
            courier = roles is not None and roles[1] == partition
            rows = yield from _lead(shipment, facts, mine, listener, times, reached, keep_listening=courier)
            if rows is not None and roles is not None:
                _tell_siblings(hold, sum(fact["executor"] == executor for fact in facts) - 1)
        else:
            listener.close()
            rows = [] if _await_end(leader["held"]) else None
        if rows is not None and roles is not None:
            rows = _hand_over(shipment, facts, roles, partition, rows, listener, failed_rows)
        yield from rows or ()
    finally:
        listener.close()
        hold.close()


def _wave(stage: int, executors: list[str]) -> str:
    """Return an identifier that tasks share if Spark started them together: a lost executor does not come back."""
    return hashlib.sha256(f"{stage} {executors}".encode()).hexdigest()


def _roles(facts: list[dict[str, Any]], key: bytes | None) -> tuple[int, int | None] | None:
    """Return the holder of a failed run and its courier: the task that sends the holder's rows, if it has any.

    The holder is a sibling if there is one, since siblings have no rows. Otherwise partition 0 is the holder, and
    partition 1 the courier: it leads a node without the rendezvous store, so its listening socket is free.
    """
    leaders = {fact["executor"]: fact["partition"] for fact in reversed(facts)}
    siblings = [fact["partition"] for fact in facts if leaders[fact["executor"]] != fact["partition"]]
    if siblings:
        return siblings[-1], None
    return (0, 1) if key is not None and len(facts) > 1 else None


def _hand_over(
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
    """Receive the holder's rows; ``None`` if they do not come in time. Anyone can connect, so the key is checked."""
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


def _hold(endpoint: exchange.Endpoint | None, timeout: float) -> None:
    """Keep this task from ending before the driver has cancelled the job, after which the channel's port is closed."""
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


def _tell_siblings(hold: socket.socket, count: int) -> None:
    """Tell the sibling tasks, which wait for this task to end, that the run has failed."""
    hold.settimeout(_PEER_TIMEOUT)
    for _ in range(count):
        with suppress(OSError):  # a sibling is gone: then Spark ends the stage
            sibling, _ = hold.accept()
            with sibling:
                sibling.sendall(_FAILED)


def _await_end(held: str) -> bool:
    """Keep this task's slot until the leader's task ends for any reason. Return whether the run has failed."""
    with socket.socket(socket.AF_UNIX) as waiting:
        try:
            waiting.connect("\0" + held)
            return waiting.recv(1) == _FAILED
        except OSError:  # the leader has already ended
            return False


def _lead(
    shipment: Shipment,
    facts: list[dict[str, Any]],
    mine: Mapping[str, Any],
    listener: socket.socket,
    times: dict[str, float],
    reached: bool,
    keep_listening: bool,
) -> Generator[bytes, None, list[bytes] | None]:
    """Run this executor's agent and yield the rows of its report.

    If the run has failed, return the rows instead, unless their logs exceed ``_MAX_LOGS``.
    """
    with host_node(shipment["run_id"], mine["partition"]) as node:
        root = os.path.join(node.folder, "package.zip")
        with open(root, "wb") as file:
            file.write(_content(shipment["package"]))
        agent = node.start(
            root,
            {"store": listener},
            owner=executor_of_this(),
            warmth=shipment["warmth"],
            task_cpus=mine["cpus"],
            importing=_Importing(
                shipment["endpoint"], str(mine["executor"]), len({fact["executor"] for fact in facts})
            ),
        )
        if not keep_listening:
            listener.close()
        order = {
            "job": shipment["job"],
            "parts": {part: _content(name) for part, name in shipment["parts"].items()},
            "executor": mine["executor"],
            "facts": facts,
            "folder": node.folder,
            "root": root,
            "sys_path": [path for path in sys.path if path],
            "endpoint": shipment["endpoint"],
            "on_driver": False,
            "reached": reached,
            "times": times,
            "note": agent.note,
        }
        report = node.converse(order)
        if report is None:
            _tell_lost(shipment["endpoint"], str(mine["executor"]))
            return [b"L" + str(mine["host"]).encode()]
        told, unsent = b"R" + report["report"], report["rest"]
        if report["failed"] and sum(os.path.getsize(file["path"]) - file["offset"] for file in unsent) <= _MAX_LOGS:
            return [told, *_output(unsent, shipment["chunk"])]
        yield told
        yield from _output(unsent, shipment["chunk"])
        for rank, path in report["values"].items():
            for piece in pieces(path, shipment["chunk"]):
                yield b"V" + struct.pack("!I", rank) + piece
        return None


def _content(what: bytes | str) -> bytes:
    """Return the given bytes, or the content of a file that Spark has delivered."""
    if isinstance(what, bytes):
        return what
    from pyspark import SparkFiles

    with open(SparkFiles.get(what), "rb") as file:
        return file.read()


def _output(files: list[dict[str, Any]], chunk: int) -> Iterator[bytes]:
    for rank, stream, offset, piece in rest(files, chunk):
        yield b"G" + struct.pack("!IBQ", rank, stream, offset) + piece


class _Importing:
    """A callback that tells the driver what a warm process imports, until the driver cannot be reached.

    It uses no thread: the first thread of a process changes which signals its children ignore (the C library's own),
    and :func:`start_agent` uses those to find a warm process.
    """

    def __init__(self, endpoint: exchange.Endpoint | None, executor: str, nodes: int) -> None:
        self._endpoint = endpoint
        self._executor, self._nodes = executor, nodes

    def __call__(self, module: str) -> None:
        if self._endpoint is not None:
            try:
                message = messages.Importing(self._executor, self._nodes, module)
                exchange.tell(self._endpoint, [message], _IMPORTING_TIMEOUT)
            except OSError:
                self._endpoint = None


def _tell_lost(endpoint: exchange.Endpoint | None, executor: str) -> None:
    """Tell the driver that this node's agent has died: it may never have reached the channel, and other nodes wait."""
    if endpoint is not None:
        with suppress(OSError):
            exchange.tell(endpoint, [messages.Hello(executor), messages.Dead(), messages.Bye()])
