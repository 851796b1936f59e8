"""What runs inside a barrier task's Python worker: standard library and pyspark only, pickled by value.

The worker states its facts, learns everybody's, and if its task leads its executor, runs the agent as a child. It keeps
nothing: no environment variable is set, no module of this package stays imported, since Spark reuses workers.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from distributor import control, devices, network, processes


class Shipment(TypedDict):
    """What every task gets: plain values, since this package is not importable in the worker.

    ``gpu`` is the name of the GPU resource or ``None``; ``chunk`` the bytes of one piece of a return value.
    """

    run_id: str
    job: bytes
    package: bytes
    endpoint: tuple[str, int, str, bytes] | None
    driver_host: str
    gpu: str | None
    chunk: int


def run_task(shipment: Shipment) -> Iterator[bytes]:
    """One barrier task from its facts to what it sends back in band.

    Yields:
        ``b"R" + pickled NodeReport``, ``b"V" + uint32 rank + piece of its pickled value``, or ``b"L" + host`` if the
        agent died; nothing if another task leads this executor.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    partition = context.partitionId()
    executor = context.getTaskInfos()[partition].address
    address = _address(executor.rpartition(":")[0], shipment["driver_host"])
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
        }
        everyone = [json.loads(text) for text in context.allGather(json.dumps({"facts": mine, "held": held}))]
        leader = min(
            (entry for entry in everyone if entry["facts"]["executor"] == executor),
            key=lambda entry: entry["facts"]["partition"],
        )
        if leader["held"] == held:
            yield from _lead(shipment, [entry["facts"] for entry in everyone], mine, listener)
        else:
            listener.close()
            _await_end(leader["held"])
    finally:
        listener.close()
        hold.close()


def _address(executor_host: str, driver_host: str) -> str:
    """The address of this node for the others: the one it reaches the driver from.

    On the driver's own machine that may be loopback where the executor has an address that others reach.
    """
    own = network.resolve(executor_host.strip("[]"))
    towards = network.address_towards(driver_host)
    return own if towards is None or (network.is_loopback(towards) and not network.is_loopback(own)) else towards


def _await_end(held: str) -> None:
    """Keeps this task's slot until the leader's task ends, whatever ends it."""
    with socket.socket(socket.AF_UNIX) as waiting:
        try:
            waiting.connect("\0" + held)
            waiting.recv(1)
        except OSError:  # ended before, or just now
            pass


def _lead(
    shipment: Shipment, facts: list[dict[str, Any]], mine: Mapping[str, Any], listener: socket.socket
) -> Iterator[bytes]:
    """Runs this executor's agent and yields what it reports."""
    folder = control.make_folder(shipment["run_id"])
    agent = line = None
    try:
        root = os.path.join(folder, "package.zip")
        with open(root, "wb") as file:
            file.write(shipment["package"])
        agent, line = control.start_agent(root, {"store": listener}, os.environ)
        listener.close()
        order = {
            "job": shipment["job"],
            "executor": mine["executor"],
            "facts": facts,
            "folder": folder,
            "root": root,
            "sys_path": [path for path in sys.path if path],
            "endpoint": shipment["endpoint"],
            "on_driver": False,
        }
        try:
            control.send(line, order)
            report = control.receive(line)
        except OSError:
            report = None
        if report is None:
            yield b"L" + str(mine["host"]).encode()
            return
        yield b"R" + report["report"]
        for rank, path in report["values"].items():
            with open(path, "rb") as file:
                while piece := file.read(shipment["chunk"]):
                    yield b"V" + struct.pack("!I", rank) + piece
    finally:
        if line is not None:
            line.close()
        if agent is not None:
            agent.wait()
        processes.kill_node(processes.node_id(shipment["run_id"], mine["partition"]))
        shutil.rmtree(folder, ignore_errors=True)
