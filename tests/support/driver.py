"""A small driver: runs a job on agents of this machine, stops it when a rank fails, and remembers what nodes tell."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil
import watch
from jobs import make_job

from distributor.channel.server import ChannelServer
from distributor.run.handle import Run
from distributor.schedulers.local import LocalScheduler
from distributor.shipping.pickling import dump_function, load_value
from distributor.values import messages
from distributor.values.job import Function, Job
from distributor.values.outcome import Collected, Log

M = TypeVar("M", bound=messages.Message)


class Driver:
    """A run on ``nodes`` agents.

    Args:
        job: what to run.
        nodes: number of agents.
        stops: whether it stops the run when a node tells of a failure, as a driver does.
    """

    def __init__(self, job: Job, nodes: int, stops: bool = True) -> None:
        self.job = job
        self.nodes = nodes
        self.scheduler = LocalScheduler(nodes)
        self.server = ChannelServer(self)
        self.events: list[tuple[str, messages.Message]] = []
        self.lost: list[str] = []
        self.logs: dict[tuple[int, int], bytes] = {}
        self.collected: Collected | None = None
        self._stops = stops
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.collected = self.scheduler.run(self.job, self.server)

    def on_log(self, log: Log) -> None:
        key = (log.rank, log.stream)
        self.logs[key] = self.logs.get(key, b"")[: log.offset] + log.data

    def on_message(self, node: str, message: messages.Message) -> None:
        self.events.append((node, message))
        if isinstance(message, messages.Failed) and self._stops:
            self.server.stop("a rank failed")

    def on_lost(self, node: str, why: str) -> None:
        self.lost.append(node)
        if self._stops:
            self.server.stop("a node is lost")

    def offsets(self, node: str) -> tuple[messages.Offset, ...]:
        return tuple((rank, stream, len(data)) for (rank, stream), data in self.logs.items())

    def heard(self, kind: type[M]) -> list[M]:
        return [message for _, message in self.events if isinstance(message, kind)]

    def port_of_node_0(self, stopped: int = 0) -> int:
        """The port that node 0 offers for the next attempt, once all nodes have stopped once more."""
        watch.until(lambda: len(self.heard(messages.Stopped)) == (stopped + 1) * self.nodes)
        first = json.loads(self.heard(messages.Hello)[0].placement)[0]["executor"]
        return [m.port for node, m in self.events if node == first and isinstance(m, messages.Stopped)][stopped]

    def agents(self) -> list[psutil.Process]:
        return watch.agents_of(os.getpid())

    def result(self) -> Collected:
        self._thread.join(watch.DEADLINE)
        assert self.collected is not None
        return self.collected

    def values(self) -> list[Any]:
        return [load_value(chunks, rank) for rank, chunks in sorted(self.result().values.items())]


def submit(function: Callable[..., Any], *args: Any, nodes: int = 2, **job: Any) -> Run[Any]:
    """A run on agents of this machine, as users have it."""
    return Run(_job(function, args, job), LocalScheduler(nodes)).start()


def _job(function: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Job:
    target = Function("test", dump_function(function, args, {}))
    asked = {"grace_period": 1.0, "collect": "all", **given}
    return make_job(secrets.token_hex(6), asked.pop("num_processes", 2), target, False, **asked)


@contextmanager
def driven(
    function: Callable[..., Any], *args: Any, nodes: int = 2, stops: bool = True, **job: Any
) -> Iterator[Driver]:
    """A run of a function; at the end, nothing of it is left."""
    driver = Driver(_job(function, args, job), nodes, stops)
    with driver.server:
        driver._thread.start()
        try:
            yield driver
        finally:
            driver.server.end()
            driver.server.stop("the test is over", grace=False)
            driver._thread.join(watch.DEADLINE)
            driver.scheduler.cancel()
            driver._thread.join(watch.DEADLINE)
    watch.gone(driver.job.run_id)
