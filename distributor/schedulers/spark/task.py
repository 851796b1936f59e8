"""What runs inside a barrier task's Python worker: standard library and pyspark only, pickled by value.

The worker states its facts, learns everybody's, and if its task leads its executor, runs the agent as a child. It keeps
nothing: no environment variable is set, no module of this package stays imported, since Spark reuses workers.

When a run has failed, its Spark job has to fail too, but not by an exception in a task, for which Spark would run the
stage again. So one task, the *holder*, does not end while the others bring what the driver has to know by an
accumulator, which Spark delivers as each of them ends; then the driver cancels the job. They do not wait for one
another by ``allGather``: a task that is killed while it waits there takes its executor with it (Spark 4.3).
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
from distributor.values.job import Warmth

#: What a leader tells its siblings when the run has failed, and the courier the holder when it has its rows.
_FAILED = _RECEIVED = b"1"

#: Seconds that another task may take to answer.
_PEER_TIMEOUT = 5.0

#: Seconds that the driver may take to hear what is being imported, which goes on meanwhile.
_IMPORTING_TIMEOUT = 1.0

#: Seconds between the holder's looks at whether the driver is still there.
_HOLD_INTERVAL = 0.2

#: Bytes of logs that a failed node brings by the accumulator at most: that passes through Spark's scheduler.
_MAX_LOGS = 16 << 20

#: Bytes that a task takes from another at most.
_MAX_ROWS = 64 << 20

_DIGEST_BYTES = 32


class Shipment(TypedDict):
    """What every task gets: plain values, since this package is not importable in the worker.

    ``parts``: of the job, by the names of files that Spark has brought; ``package``: likewise, or itself.
    ``exchange``: facts go over the channel where it can be reached; ``silence``: seconds after which a driver that does
    not answer is given up; ``warmth``: what is asked of warm processes; ``gpu``: the name of the GPU resource or
    ``None``; ``chunk``: the bytes of one piece of a return value; ``patience``: the seconds in which all nodes of a
    failed run end; ``key`` authenticates a task's rows to another task, ``None`` if rows must not go from one executor
    to another.
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
    """One barrier task from its facts to what it sends back in band.

    Args:
        shipment: what to do.
        failed_rows: accumulator of ``((partition, rows),)`` for the rows of a failed run; ``None`` to yield them.

    Yields:
        ``b"R" + pickled NodeReport``, ``b"V" + uint32 rank + piece of its pickled value``, ``b"G" + uint32 rank + uint8
        stream + uint64 offset + piece of its output``, or ``b"L" + host`` if the agent died; nothing if another task
        leads this executor.
    """
    from pyspark import BarrierTaskContext

    times = {"task": time.time()}
    context = BarrierTaskContext.get()
    partition = context.partitionId()
    executors = [task.address for task in context.getTaskInfos()]
    executor = executors[partition]
    # Spark names a task's executor by the address that its connection to the driver comes from; the one at which other
    # executors fetch from it is what it was started with.
    known_as = executor_host(executor_of_this()) or executor.rpartition(":")[0]
    address = network.node_address(known_as, shipment["driver_host"])
    listener = network.listen(address)
    # Held for as long as this task lives, in the kernel's own name space: it cannot be left behind (unix(7), abstract).
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
    """What tasks have in common that Spark has started together: an executor that is lost does not come back."""
    return hashlib.sha256(f"{stage} {executors}".encode()).hexdigest()


def _roles(facts: list[dict[str, Any]], key: bytes | None) -> tuple[int, int | None] | None:
    """The holder of a failed run, and the courier: the task that brings the holder's rows, if it has any.

    The holder is a sibling where there is one, since those have none. Otherwise it is partition 0, and partition 1
    the courier: it leads a node too, but not that of the rendezvous store, so its listening socket is free.
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
    """Brings the rows of a task of a failed run to the driver, or returns them to be yielded if that cannot be."""
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
    """Gives rows to the courier, which may still wait for its ranks to end; whether it has taken them."""
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
    """The holder's rows, ``None`` if they do not come in time. Anybody may connect: only the right key counts."""
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
    """Keeps this task from ending before the driver has cancelled the job; after that, the channel's port is closed."""
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
        except OSError:  # never reachable from here: Spark ends this worker soon after the job
            pass
        time.sleep(min(left, _HOLD_INTERVAL))


def _tell_siblings(hold: socket.socket, count: int) -> None:
    """Tells the tasks that wait for this one's end that the run has failed."""
    hold.settimeout(_PEER_TIMEOUT)
    for _ in range(count):
        with suppress(OSError):  # one is gone: then Spark ends the stage
            sibling, _ = hold.accept()
            with sibling:
                sibling.sendall(_FAILED)


def _await_end(held: str) -> bool:
    """Keeps this task's slot until the leader's task ends, whatever ends it; whether the run has failed."""
    with socket.socket(socket.AF_UNIX) as waiting:
        try:
            waiting.connect("\0" + held)
            return waiting.recv(1) == _FAILED
        except OSError:  # ended before, or just now
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
    """Runs this executor's agent and yields what it reports, or returns that if the run has failed."""
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
    """Bytes, or those of a file that Spark has brought."""
    if isinstance(what, bytes):
        return what
    from pyspark import SparkFiles

    with open(SparkFiles.get(what), "rb") as file:
        return file.read()


def _output(files: list[dict[str, Any]], chunk: int) -> Iterator[bytes]:
    for rank, stream, offset, piece in rest(files, chunk):
        yield b"G" + struct.pack("!IBQ", rank, stream, offset) + piece


class _Importing:
    """Tells the driver what a warm process imports, until it is found out of reach.

    Not in a thread: the first thread of a process changes which signals its children ignore (the C library's own), and
    with that what :func:`start_agent` finds a warm process by.
    """

    def __init__(self, endpoint: exchange.Endpoint | None, executor: str, nodes: int) -> None:
        self._endpoint = endpoint
        self._event = {"event": "importing", "node": executor, "nodes": nodes}

    def __call__(self, module: str) -> None:
        if self._endpoint is not None:
            try:
                exchange.tell(self._endpoint, [{**self._event, "module": module}], _IMPORTING_TIMEOUT)
            except OSError:
                self._endpoint = None


def _tell_lost(endpoint: exchange.Endpoint | None, executor: str) -> None:
    """Tells the driver that this node's agent has died: it may never have reached the channel, and the others wait."""
    if endpoint is not None:
        hello = {"event": "hello", "node": executor, "placement": []}
        with suppress(OSError):
            exchange.tell(endpoint, [hello, {"event": "dead"}, {"event": "bye"}])
