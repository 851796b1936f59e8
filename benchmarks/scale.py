"""Measure what a large run costs its driver: CPU and memory, with simulated nodes on the real channel.

The nodes are in processes of their own, and do what tasks and agents do on the channel; they have no ranks. Printed are
seconds of CPU of the driver's process for the start of all nodes, for ranks' stacks, and for a run that is cancelled or
ends well; its CPU while each node sends a line and a report each second and a heartbeat every five; and its memory.

    python benchmarks/scale.py                          # 100, 1,000 and 10,000 nodes
    python benchmarks/scale.py 1000 --points scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import pickle
import resource
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from distributor.api.parameters import GROUPS, Options
from distributor.channel import frames, proof
from distributor.channel.server import ChannelServer
from distributor.launch.torchrun import Torchrun
from distributor.machine import network
from distributor.run.handle import Run
from distributor.schedulers.spark.placing import Placing
from distributor.values import messages
from distributor.values.job import Job, Module, StatusDetail
from distributor.values.messages import Message
from distributor.values.outcome import REPORTS, Collected, Log, NodeReport, Outcome
from distributor.values.placement import NodeFacts
from distributor.values.plan import Endpoint
from distributor.values.reports import Report, pack

ROUNDS = 20  # lines and reports of each node, one of each a second
AT_ONCE = 50  # connections that the nodes of a process open at the same time
STACKS = """Current thread 0x00007f8d69c73b80 (most recent call first):
  File "/opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3195 in all_reduce
  File "/home/me/train.py", line 40 in train
"""

_FRAME = struct.Struct("!IB")


# The nodes


class Line(asyncio.Protocol):
    """A connection to the driver. ``on`` gets each message."""

    def __init__(self, on: Callable[[Message], None]) -> None:
        self._on = on
        self._data = b""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= _FRAME.size:
            end = _FRAME.size + _FRAME.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            body, self._data = self._data[_FRAME.size : end], self._data[end:]
            if b'"BeatHeard"' not in body:
                self._on(messages.decode(json.loads(body)))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class SimulatedNode:
    """A task and an agent with one rank, as the driver sees them."""

    def __init__(self, number: int, shared: Simulation) -> None:
        self.number, self._shared = number, shared
        self._executor = f"host-{number}:{4000 + number % 1000}"
        self._rank, self._offsets = -1, [0, 0]
        self._line: Line | None = None
        self._share: Any = None

    async def start(self) -> None:
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        facts = NodeFacts(
            self.number,
            self._executor,
            self._executor.partition(":")[0],
            f"10.{self.number >> 16}.{self.number >> 8 & 255}.{self.number & 255}",
            4000,
            versions={"Python": "3.12.1", "torch": "2.9.0+cu128"},
            machine=f"machine-{self.number}",
            mounts=f"mounts-{self.number}",
        )
        told = messages.TaskFacts("stage", self.number, f"distributor-3f2a-{self.number}", facts)
        async with self._shared.room:
            task = await self._connect(answer.set_result, told)
        placed = await answer
        task.transport.close()
        assert isinstance(placed, messages.Placed) and placed.share is not None, placed
        self._share, self._rank = placed.share, placed.share.node.first_rank
        secret = proof.make(self._shared.seal, self._executor)
        welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on(message: Message) -> None:
            if isinstance(message, messages.Welcome):
                welcome.set_result(None)
            self._obey(message)

        async with self._shared.room:
            self._line = await self._connect(on, messages.Hello(self._executor, placed.share.digest, "", secret))
            await welcome
        self._tell(messages.Started(attempt=0))

    async def _connect(self, on: Callable[[Message], None], first: Message) -> Line:
        endpoint = self._shared.endpoint
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(
            lambda: Line(on), endpoint.host, endpoint.port, ssl=self._shared.tls, server_hostname=""
        )
        line.transport.write(endpoint.token + frames.pack(first))
        return line

    def _obey(self, message: Message) -> None:
        match message:
            case messages.Dump():
                self._tell(messages.StackDump(message.number, self._rank, STACKS))
            case messages.Stop():
                self._tell(messages.Bye())
            case messages.Farewell():
                assert self._line is not None
                self._line.transport.close()

    def _tell(self, message: Message) -> None:
        assert self._line is not None
        self._line.transport.write(frames.pack(message))

    async def work(self) -> None:
        """Send a line and a report each second, and a heartbeat every five."""
        await asyncio.sleep(self.number % 1000 / 1000)
        assert self._line is not None
        for second in range(ROUNDS):
            report = pack(Report(second, 0, 0, time.time(), second, None, {"loss": 0.5})).decode()
            data = b""
            for at, (stream, text) in enumerate(((1, f"step {second} loss 0.5\n"), (REPORTS, report))):
                data += frames.pack_log(Log(self._rank, stream, self._offsets[at], text.encode()))
                self._offsets[at] += len(text)
            self._line.transport.write(data)
            if second % 5 == self.number % 5:
                self._tell(messages.Beat(1, 0.0))
            await asyncio.sleep(1.0)

    def finish(self) -> None:
        node = self._share.node
        outcome = Outcome(self._rank, node.host, "finished", called=1.0, returned=2.0)
        report = NodeReport(node.node_rank, node.host, (outcome,), times={"task": 1.0}, passed=True)
        value = base64.b64encode(pickle.dumps(0.5)).decode()
        self._tell(messages.Finished(report, ((self._rank, value),)))
        self._tell(messages.Bye())

    async def ended(self) -> None:
        assert self._line is not None
        await self._line.closed


class Simulation:
    """The nodes of one process; it takes orders as lines of text."""

    def __init__(self, endpoint: Endpoint, seal: bytes, numbers: Iterable[int]) -> None:
        self.endpoint, self.seal = endpoint, seal
        self.tls: ssl.SSLContext = network.pinned_tls(endpoint.certificate)
        self.room = asyncio.Semaphore(AT_ONCE)
        self._nodes = [SimulatedNode(number, self) for number in numbers]

    async def run(self, orders: asyncio.StreamReader) -> None:
        while order := (await orders.readline()).decode().strip():
            if order == "start":
                await asyncio.gather(*(node.start() for node in self._nodes))
            elif order == "work":
                await asyncio.gather(*(node.work() for node in self._nodes))
            elif order == "finish":
                for node in self._nodes:
                    node.finish()
            if order in ("finish", "await_end"):
                await asyncio.gather(*(node.ended() for node in self._nodes))
            print(order, flush=True)


async def simulate(source: BinaryIO) -> None:
    orders = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), source)
    await Simulation(*pickle.loads(base64.b64decode(await orders.readline()))).run(orders)


# The driver


class Simulations:
    """The scheduler of the benchmark: its nodes are simulated."""

    on_driver = False
    slots_may_come = False
    omp_threads = None

    def __init__(self, nodes: int, processes: int) -> None:
        self._nodes, self._count = nodes, processes
        self._processes: list[subprocess.Popen[bytes]] = []
        self.listens, self.ended = threading.Event(), threading.Event()

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=target)

    def waiting_for(self) -> StatusDetail | None:
        return None

    def leaving(self) -> str | None:
        return None

    def room(self, job: Job) -> int | None:
        return None

    def cancel(self) -> bool:
        return False

    def run(self, job: Job, server: ChannelServer) -> Collected:
        seal = server.seal()
        server.place_by(Placing(job, lambda own: 0).place)
        endpoint = server.listen("127.0.0.1", "127.0.0.1")
        for first in range(self._count):
            process = subprocess.Popen(
                [sys.executable, __file__, "--simulate"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert process.stdin is not None
            about = pickle.dumps((endpoint, seal, range(first, self._nodes, self._count)))
            process.stdin.write(base64.b64encode(about) + b"\n")
            self._processes.append(process)
        self.listens.set()
        self.ended.wait()
        return server.returned(60.0) or Collected()

    def order(self, order: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{order}\n".encode())
            process.stdin.flush()

    def wait(self) -> None:
        """Wait until all nodes have done what they were ordered."""
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("the simulated nodes have failed")

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def make_job(nodes: int) -> Job:
    options = Options.of(num_processes=nodes, use_gpu=False, heartbeat_timeout=600.0, start_timeout=3600.0)
    own = {field.name for field in fields(Job)}
    groups = {name: getattr(options, name) for name in GROUPS if name in own}
    return Job(run_id="3f2a", target=Module("train"), launch=Torchrun(), ranks_per_task=1, **groups)


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak() -> float:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def spent(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of CPU and of time that work took."""
    before, begun = cpu(), time.monotonic()
    work()
    return cpu() - before, time.monotonic() - begun


def work(scheduler: Simulations) -> None:
    """Wait until the driver has taken all lines and reports: on a busy machine, it or the nodes may be late."""
    scheduler.wait()
    while spent(lambda: time.sleep(1.0))[0] > 0.1:
        pass


def drive(nodes: int, processes: int) -> dict[str, float]:
    """Measure two runs in this process: one is cancelled, the other ends well."""
    empty, found = peak(), {}
    for ends_well in (False, True):
        scheduler = Simulations(nodes, processes)
        run = Run(make_job(nodes), scheduler).start()
        scheduler.listens.wait()
        scheduler.order("start")
        started = spent(scheduler.wait)
        while run._supervisor.state.nodes.up < nodes:
            time.sleep(0.1)
        if not ends_well:
            found["start"], found["start, time"] = started
            scheduler.order("work")
            found["steady, CPU"] = spent(lambda scheduler=scheduler: work(scheduler))[0] / ROUNDS
            found["stacks"], _ = spent(lambda run=run: str(run.dump_stacks(timeout=60.0)))
            scheduler.order("await_end")
            run.cancel()
            found["stop"], found["stop, time"] = spent(scheduler.wait)
            found["memory"] = peak() - empty
        else:
            scheduler.order("finish")

            def end(run: Run = run, scheduler: Simulations = scheduler) -> None:
                scheduler.wait()
                scheduler.ended.set()
                assert run.results(timeout=600.0) == [0.5] * nodes

            found["end"], found["end, time"] = spent(end)
        scheduler.ended.set()
        run.wait(600.0)
        scheduler.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--processes", type=int, default=2, help="that simulate nodes")
    parser.add_argument("--points", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--simulate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if asked.simulate:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(simulate(sys.stdin.buffer))
        return
    if asked.drive:
        print(json.dumps(drive(asked.nodes[0], asked.processes)))
        return
    points: dict[str, dict[str, float]] = {}
    for nodes in asked.nodes:
        command = [sys.executable, __file__, str(nodes), "--drive", "--processes", str(asked.processes)]
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        points[str(nodes)] = json.loads(output.decode().splitlines()[-1])
        if not points.keys() - {str(nodes)}:
            print("nodes", *(f"{name:>12}" for name in points[str(nodes)]))
        print(f"{nodes:5}", *(f"{value:12.2f}" for value in points[str(nodes)].values()), flush=True)
    if asked.points is not None:
        asked.points.write_text(json.dumps(points, indent=2) + "\n")


if __name__ == "__main__":
    main()
