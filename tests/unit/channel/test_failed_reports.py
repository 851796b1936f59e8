"""The reports of a failed run's nodes: which task waits for the end of the Spark job, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import watch
from listeners import Listener

from distributor.channel import connections, proof, requests
from distributor.channel.server import ChannelServer
from distributor.values import messages
from distributor.values.messages import FailedReport
from distributor.values.outcome import NodeReport


class Driver:
    """A driver with the tasks that report to it."""

    def __init__(self, server: ChannelServer, pool: ThreadPoolExecutor) -> None:
        self.server, self.reports, self._pool = server, server.failed_reports, pool
        at = server.listen("127.0.0.1", "127.0.0.1")
        self.at = at.host, at.port, at.certificate, at.token
        self.seal = server.seal()
        self.complete = threading.Event()
        self.reports.on_complete = self.complete.set

    def report(self, node: str, row: bytes, nodes: int = 2, patience: float = watch.DEADLINE) -> Future[None]:
        """Report as the task of a node does. The result is there once the task may end."""
        told = FailedReport(nodes, len(row), node, proof.make(self.seal, node))
        return self._pool.submit(requests.send_failed_report, self.at, told, row, patience)

    def node(self, name: str) -> Any:
        """A node's main connection."""
        line = connections.connect(self.at)
        line.sendall(connections.pack(messages.Hello(name, secret=proof.make(self.seal, name))))
        assert isinstance(connections.read(line), messages.Welcome)
        return line


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr("distributor.channel.server.RETURN_WINDOW", 0.0)
    with ThreadPoolExecutor() as pool, ChannelServer(Listener()) as server:
        yield Driver(server, pool)


def ends(task: Future[None]) -> None:
    with suppress(ConnectionError):
        task.result(watch.DEADLINE)


def first_waits(driver: Driver, **how: Any) -> Future[None]:
    task = driver.report("a", b"Ra", **how)
    watch.until(lambda: driver.reports._waiting is not None)
    return task


def test_the_first_task_waits_until_the_driver_ends_the_job(driver: Driver) -> None:
    first = first_waits(driver, nodes=3)
    for node in ("b", "c"):
        assert not driver.complete.is_set()
        ends(driver.report(node, b"R" * (1 << 20), nodes=3))
    assert driver.complete.is_set()
    assert driver.reports.rows == [b"Ra", *[b"R" * (1 << 20)] * 2]
    assert not first.done()
    driver.server.retire()
    ends(first)


def test_a_task_does_not_wait_for_ever(driver: Driver) -> None:
    """The next one waits in its place."""
    with pytest.raises(TimeoutError):
        driver.report("a", b"Ra", patience=0.1).result(watch.DEADLINE)
    watch.until(lambda: driver.reports._waiting is None)
    second = driver.report("b", b"Rb")
    assert driver.complete.wait(watch.DEADLINE)
    watch.until(lambda: driver.reports._waiting is not None)
    assert not second.done()


def test_a_report_that_spark_alone_brings_ends_the_wait(driver: Driver) -> None:
    first = first_waits(driver, nodes=3)
    ends(driver.report("b", b"", nodes=3))
    ends(first)
    ends(driver.report("c", b"Rc", nodes=3))  # does not wait, either
    assert not driver.reports.complete


def test_a_report_that_is_cut_off_ends_the_wait(driver: Driver) -> None:
    first = first_waits(driver)
    with connections.connect(driver.at) as line:
        line.sendall(connections.pack(FailedReport(2, 100, "b", proof.make(driver.seal, "b"))) + b"Rb")
        line.unwrap()  # ends the connection with nothing unread, so that the driver gets these bytes
    ends(first)
    assert driver.reports.rows == [b"Ra"]


def test_a_lost_node_ends_the_wait(driver: Driver) -> None:
    """Unless it has reported."""
    a, b = driver.node("a"), driver.node("b")
    first = first_waits(driver)
    a.close()
    listener: Any = driver.server._listener
    watch.until(lambda: [node for node, _ in listener.lost] == ["a"])
    assert not first.done()
    b.close()
    ends(first)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_node_that_has_succeeded_ends_the_wait(driver: Driver, stopped: bool) -> None:
    """If the run was stopped before its end, it reports a failure, too."""
    first = first_waits(driver)
    if stopped:
        driver.server.stop("a rank failed")
    with driver.node("b") as line:
        line.sendall(connections.pack(messages.Finished(NodeReport(1, "host", passed=True))))
        line.sendall(connections.pack(messages.Bye()))
        while not isinstance(told := connections.read(line), messages.Farewell):
            assert isinstance(told, messages.Stop)
        assert told.failed is stopped
    if not stopped:
        ends(first)
        return
    ends(driver.report("b", b"Rb"))
    assert driver.complete.is_set()
    assert not first.done()


@pytest.mark.parametrize("what", ["secret", "node"])
def test_a_report_without_the_nodes_secret_is_refused(driver: Driver, what: str) -> None:
    secret = proof.make(b"guessed" if what == "secret" else driver.seal, "a")
    told = FailedReport(1, 2, "a" if what == "secret" else "b", secret)
    with suppress(OSError):
        requests.send_failed_report(driver.at, told, b"Ra", watch.DEADLINE)
    assert driver.reports.rows == []
    assert not driver.complete.is_set()
