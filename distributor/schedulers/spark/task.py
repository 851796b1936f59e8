"""The code that runs in the Python worker of a barrier task.

Each task sends facts about its machine to all others. The leader of each executor then starts the executor's agent and
waits for its report.

The code is pickled by value, because workers may not have this package installed, and uses only the standard library
and pyspark. Spark reuses workers for other jobs, so it sets no environment variable and leaves no module of this
package imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from distributor.channel import proof, requests as exchange, tasks
from distributor.channel.connections import Endpoint
from distributor.errors import StartError
from distributor.machine import devices, folders, network, processes, versions
from distributor.schedulers.hosting.host_node import host_node
from distributor.schedulers.hosting.report import pieces, rest
from distributor.schedulers.spark.executor import executor_host, executor_of_this
from distributor.schedulers.spark.rows import CROWDED
from distributor.schedulers.spark.shipment import Shipment
from distributor.text.wording import no_temporary_folder
from distributor.values import codec, messages
from distributor.values.files import FileHead
from distributor.values.layout import CALL
from distributor.values.placement import NodeFacts, host_in
from distributor.values.plan import AgentOrder

_IMPORTING_TIMEOUT = 1.0  # seconds to try to tell the driver which module is being imported


def run_task(shipment: Shipment) -> Iterator[bytes]:
    """Run one barrier task: exchange facts with the other tasks, run the executor's agent, and yield rows for Spark.

    If Spark has put too many tasks on an executor, all tasks know it at once, and end; the driver submits the job
    again.

    A task yields no rows if a sibling leads, or if the run is stopped before it begins. The first byte of a row is its
    kind:

    - ``b"R" + pickled NodeReport``
    - ``b"V" + uint32 rank + piece of its pickled return value``
    - ``b"D" + uint32 rank + uint64 size + sha256`` of a return value that was sent directly to the driver
    - ``b"G" + uint32 rank + uint8 stream + uint64 offset + piece of its output``
    - ``b"F" + uint32 length + FileHead as JSON + piece`` of a new file of the node's ranks
    - ``b"L" + host`` if the agent died
    - ``b"E" + JSON`` of an ``UnfitNode`` if the node's temporary folder cannot be used
    - ``b"C"`` if the task has ended at once because an executor has more ranks than it may host
    """
    from pyspark import BarrierTaskContext

    times = {"task": time.time()}
    context = BarrierTaskContext.get()
    executors = [task.address for task in context.getTaskInfos()]
    if shipment["most_tasks"] is not None and max(Counter(executors).values()) > shipment["most_tasks"]:
        yield CROWDED
    else:
        yield from _begin(shipment, context, executors, times)


def _begin(shipment: Shipment, context: Any, executors: list[str], times: dict[str, float]) -> Iterator[bytes]:
    """Run a task that Spark has placed well; see :func:`run_task`. ``times`` gets the end of the exchange."""
    executor = executors[context.partitionId()]
    held = f"distributor-{shipment['job_id']}-{context.taskAttemptId()}"
    hold = _hold(held)
    address = _address(executor, shipment["driver_host"])
    listener, *reserved = network.listen(address), *(network.reserve(address) for _ in range(shipment["ports"]))
    try:
        mine = _facts(context, executor, address, (listener, *reserved), shipment)
        try:
            answer, everyone = exchange.exchange(
                messages.TaskFacts(_stage_attempt(context.stageId(), executors), context.taskAttemptId(), held, mine),
                shipment["endpoint"] if shipment["exchange"] else None,
                context.allGather,
                shipment["silence"],
            )
        except exchange.StoppedError:
            return
        times["facts"] = time.time()
        reached = bool(answer)
        placed = cast(messages.Placed, answer[0]) if reached else tasks.among(everyone)[mine.partition]
        if placed.leader != held:
            listener.close()
            _await_end(placed.leader)
            return
        known = {
            "placed": [messages.encode(message) for message in answer],
            "facts": [messages.encode(message)["facts"] for message in everyone],
            "reached": reached,
        }
        secret, nodes = proof.make(shipment["seal"], executor), len(set(executors))
        row = yield from _lead(shipment, known, mine, nodes, listener, times, secret)
        hold.close()
        endpoint = shipment["endpoint"]
        if row is not None and reached and endpoint:  # then no task is in allGather when the driver cancels the job
            sent = row if len(row) <= messages.LARGEST_REPORT else b""
            report = messages.FailedReport(nodes, len(sent), executor, secret)
            with suppress(OSError):  # the driver cancels the job, or lets this task end
                exchange.send_failed_report(endpoint, report, sent, shipment["patience"])
        if row:
            yield row
    finally:
        for held_open in (listener, *reserved, hold):
            held_open.close()


def _hold(name: str) -> socket.socket:
    """Return a listening socket by which siblings can wait for the task's end. It leaves no file behind (unix(7))."""
    hold = socket.socket(socket.AF_UNIX)
    hold.bind("\0" + name)
    hold.listen(1024)
    return hold


def _await_end(held: str) -> None:
    """Wait until the leader has ended: the slot that this task keeps is for the run's CPUs and GPUs."""
    with socket.socket(socket.AF_UNIX) as waiting, suppress(OSError):  # OSError: it has already ended
        waiting.connect("\0" + held)
        waiting.recv(1)


def _address(executor: str, driver_host: str) -> str:
    """Return the address at which other nodes reach this one.

    Spark names an executor by the address from which it connects to the driver, which other executors may not reach.
    They fetch data from the host name with which it was started, so this name is preferred.
    """
    known_as = executor_host(executor_of_this()) or host_in(executor)
    return network.node_address(known_as, driver_host)


def _facts(
    context: Any, executor: str, address: str, sockets: Sequence[socket.socket], shipment: Shipment
) -> NodeFacts:
    """Return this task's facts."""
    port, *ports = (sock.getsockname()[1] for sock in sockets)
    gpu = shipment["gpu"]
    return NodeFacts(
        partition=context.partitionId(),
        executor=executor,
        host=socket.gethostname(),
        address=address,
        port=port,
        ports=tuple(ports),
        gpus=tuple(context.resources()[gpu].addresses) if gpu in context.resources() else (),
        visible_devices=devices.visible_devices(os.environ),
        cpus=context.cpus(),
        versions=versions.here(shipment["packages"]),
        machine=devices.numbered_by(processes.machine(), os.environ),
        mounts=processes.mounts(),
    )


def _stage_attempt(stage: int, executors: list[str]) -> str:
    """Return an identifier that tasks share if Spark started them together, on the same executors."""
    return hashlib.sha256(f"{stage} {executors}".encode()).hexdigest()


def _lead(
    shipment: Shipment,
    known: dict[str, Any],
    mine: NodeFacts,
    nodes: int,
    listener: socket.socket,
    times: dict[str, float],
    secret: str,
) -> Generator[bytes, None, bytes | None]:
    """Run this executor's agent and yield the rows that bring its results to the driver.

    ``known`` are the fields of its order about the other nodes. If the run has failed, return the row that alone brings
    the node's report, and yield none; ``b""`` if this takes more rows, and ``None`` if the driver knows that no report
    comes over the channel.
    """
    if (why := folders.unusable()) is not None:
        return _give_up(shipment, mine, secret, why)
    with host_node(shipment["job_id"], mine.partition) as node:
        root = _write_package(shipment, node.folder)
        if shipment["call"] is not None:
            _bring_call(shipment["call"], os.path.join(node.folder, CALL))
        spark_executor = executor_of_this()
        agent = node.start(
            root,
            {"store": listener},
            owner=spark_executor,
            warmth=shipment["warmth"],
            task_cpus=mine.cpus,
            importing=_Importing(shipment["endpoint"], mine.executor, nodes),
        )
        listener.close()
        further = {
            **known,
            "times": times,
            "note": agent.note,
            "secret": secret,
            "spark_executor": spark_executor,
        }
        result = node.converse(_order(shipment, mine.executor, node.folder, root, **further))
        if result is None:
            _tell_end(shipment["endpoint"], mine.executor, secret, messages.Dead())
            return b"L" + mine.host.encode()
        row = b"R" + result.report
        if result.failed and not (result.rest or result.files or result.cut):
            return row
        yield row
        yield from _output(result, shipment["chunk"])
        for rank, value in result.values.items():
            yield from _value(rank, value, shipment["chunk"])
        return b"" if result.failed and not result.cut else None


def _give_up(shipment: Shipment, mine: NodeFacts, secret: str, why: str) -> bytes:
    """Tell the driver that this node cannot use its temporary folder, and return a row that says so, too.

    If the driver cannot be reached, raise StartError: then Spark ends the tasks of the nodes that would wait for this
    one.
    """
    if not _tell_end(shipment["endpoint"], mine.executor, secret, messages.UnfitNode(mine.host, why)):
        raise StartError(no_temporary_folder(mine.host, why))
    return b"E" + codec.pack(messages.UnfitNode(mine.host, why))


def _write_package(shipment: Shipment, folder: str) -> str:
    """Write this package as a zip into the node's folder, and return the zip's path."""
    root = os.path.join(folder, "package.zip")
    with open(root, "wb") as file:
        file.write(_content(shipment["package"]))
    return root


def _bring_call(call: Any, path: str) -> None:
    """Put a large pickled call into the node's folder. A file that Spark has brought is not read here."""
    source = _delivered(call) if isinstance(call, str) else getattr(call, "_path", None)
    if source is None:
        with open(path, "wb") as file:
            file.write(call.value)  # Spark has decrypted it
        return
    try:
        os.link(source, path)
    except OSError:  # such as another file system
        shutil.copyfile(source, path)


def _order(shipment: Shipment, executor: str, folder: str, root: str, **further: Any) -> AgentOrder:
    """Return the order to the agent, with its further fields from ``about``."""
    return AgentOrder(
        job=shipment["job"],
        parts={part: _content(name) for part, name in shipment["parts"].items()},
        executor=executor,
        folder=folder,
        root=root,
        sys_path=[path for path in sys.path if path],
        endpoint=shipment["endpoint"],
        on_driver=False,
        in_place=shipment["in_place"],
        **further,
    )


def _value(rank: int, value: bytes | str | messages.Sent, chunk: int) -> Iterator[bytes]:
    """Yield the rows of a return value: its digest if the driver already has it, otherwise its pieces."""
    if isinstance(value, messages.Sent):
        yield b"D" + struct.pack("!IQ", rank, value.size) + value.digest
        return
    for piece in pieces(value, chunk):
        yield b"V" + struct.pack("!I", rank) + piece


def _content(content: bytes | str) -> bytes:
    """Return the given bytes, or the content of the file of this name that Spark has delivered."""
    if isinstance(content, bytes):
        return content
    with open(_delivered(content), "rb") as file:
        return file.read()


def _delivered(name: str) -> str:
    from pyspark import SparkFiles

    return str(SparkFiles.get(name))


def _output(result: messages.NodeResult, chunk: int) -> Iterator[bytes]:
    """Yield rows with what the agent could not send directly to the driver: output and files of ranks."""
    for rank, stream, offset, piece in rest(result.rest, chunk):
        yield b"G" + struct.pack("!IBQ", rank, stream, offset) + piece
    for file in result.files:
        description = codec.pack(FileHead(result.node_rank, file.entry, file.uploaded))
        head = b"F" + struct.pack("!I", len(description)) + description
        yield head
        yield from (head + piece for piece in pieces(file.source or b"", chunk))


class _Importing:
    """Tells the driver which module a warm process is importing, until the driver cannot be reached.

    Starts no thread: with the first one, the C library changes which signals a child ignores, and ``hosting`` finds a
    warm process only if it ignores the same signals as a new child would.
    """

    def __init__(self, endpoint: Endpoint | None, executor: str, nodes: int) -> None:
        self._endpoint = endpoint
        self._executor, self._nodes = executor, nodes

    def __call__(self, module: str) -> None:
        if self._endpoint is not None:
            try:
                message = messages.Importing(self._executor, self._nodes, module)
                exchange.tell(self._endpoint, [message], _IMPORTING_TIMEOUT)
            except OSError:
                self._endpoint = None


def _tell_end(endpoint: Endpoint | None, executor: str, secret: str, end: messages.Message) -> bool:
    """Tell the driver that this node has no agent, and return whether it has been told.

    It cannot notice by itself that an agent is gone that has never connected, and other nodes would wait for this one.
    """
    if endpoint is None:
        return False
    with suppress(OSError):
        hello = messages.Hello(executor, secret=secret)
        exchange.tell(endpoint, [hello, end, messages.Bye()])
        return True
    return False
