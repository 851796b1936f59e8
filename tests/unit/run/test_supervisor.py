"""How a run goes from one attempt to the next."""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import watch
from jobs import changed, make_job

from distributor.channel.node import Offsets, Rhythm, Uplink, over_tls
from distributor.channel.server import ChannelServer
from distributor.metrics.rank import Writer
from distributor.outcomes.causes import RankFailed
from distributor.run import events
from distributor.run.margins import Margins
from distributor.run.supervisor import Supervisor
from distributor.values import messages
from distributor.values.job import Job, Widths
from distributor.values.outcome import REPORTS, Collected, Failure, Log, NodeReport, Outcome
from distributor.values.placement import Node, Placement, digest
from distributor.values.plan import Endpoint
from distributor.values.reports import room

KILLED = Failure(1, 1, "host-a", "signal", "killed by SIGKILL", signal="SIGKILL", time=5.0)
RESET = Failure(0, 0, "host-a", "RuntimeError", "RuntimeError: Connection closed by peer", "Traceback", time=4.0)
WRONG = Failure(2, 2, "host-a", "ValueError", "ValueError: no", "Traceback", time=6.0)


def test_a_restart_shows_no_traceback_of_ranks_that_only_lost_their_peer() -> None:
    display = Mock()
    supervisor = Supervisor(make_job(num_processes=4, max_restarts=1), Mock(), display, Margins())
    for failure in (RESET, KILLED, WRONG):
        supervisor.on(events.Heard("a", messages.Failed(failure, attempt=0)))
    assert isinstance(supervisor.state.cause, RankFailed)
    supervisor._leave(supervisor.state, "restarting its ranks", "rank 1 failed")
    display.logs.release.assert_called_once_with([0])
    supervisor._alarm.close()


def test_a_rank_that_alone_failed_is_shown_even_if_it_lost_a_connection() -> None:
    display = Mock()
    supervisor = Supervisor(make_job(num_processes=4, max_restarts=1), Mock(), display, Margins())
    supervisor.state.on(events.Heard("a", messages.Failed(RESET, attempt=0)), time.monotonic())
    supervisor._leave(supervisor.state, "restarting its ranks", "rank 0 failed")
    display.logs.release.assert_called_once_with([])
    assert supervisor.state.reason == "rank 0 failed: RuntimeError: Connection closed by peer"
    supervisor._alarm.close()


class Breaking:
    """A scheduler with one node, whose rank is killed and whose connection breaks as the next attempt is ordered."""

    on_driver = False
    port = 4000

    def __init__(self) -> None:
        self.orders: list[messages.Message] = []

    def run(self, job: Job, server: ChannelServer) -> Collected:
        asyncio.run(self._train(server.listen("127.0.0.1", "127.0.0.1")))
        return Collected((NodeReport(0, "host-a", (Outcome(0, "host-a", "finished"),)),), {0: [pickle.dumps(7)]})

    async def _train(self, endpoint: Endpoint) -> None:
        placement = Placement((Node(0, "a", "host-a", "127.0.0.1", 1, 0, 0, 1),))
        hello = messages.Hello("a", digest(placement.text()), placement.text())
        self.begun = asyncio.Event()
        self.uplink = Uplink(over_tls(endpoint), hello, self, Rhythm(30.0, 30.0, redial=True))
        await self.uplink.open()
        self.uplink.tell(messages.Started(attempt=0))
        failure = replace(KILLED, rank=0)
        self.uplink.tell(messages.Failed(failure, attempt=0))
        self.uplink.tell(messages.Stopped(self.port, (Outcome(0, "host-a", "failed", failure),), attempt=0))
        await asyncio.wait_for(self.begun.wait(), watch.DEADLINE)
        self.uplink.renew()
        self.uplink.tell(messages.Started(attempt=1))
        await self.uplink.close()

    def on_order(self, order: messages.Message) -> None:
        self.orders.append(order)
        if isinstance(order, messages.Begin) and self.orders.count(order) == 1:
            assert self.uplink._writer is not None
            self.uplink._writer.transport.abort()
        elif isinstance(order, messages.Begin):
            self.begun.set()

    def on_offsets(self, offsets: Offsets, again: bool) -> None: ...

    def on_driver_lost(self) -> None: ...

    def status(self) -> messages.Beat:
        return messages.Beat(1)


def test_what_a_node_says_again_of_an_ended_attempt_does_not_reach_the_next() -> None:
    scheduler: Any = Breaking()
    supervisor = Supervisor(make_job(max_restarts=1), scheduler, Mock(), Margins())
    supervisor._display.logs.offsets.return_value = ()
    result = supervisor.run(0.0)
    supervisor.end(result)
    assert result.error is None
    assert result.values == {0: 7}
    assert scheduler.orders.count(messages.Begin(1, Breaking.port)) == 2
    assert supervisor.state.number == 1
    assert supervisor.state.moments.stopping is None


def test_a_cancellation_just_before_an_attempt_begins_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has left the attempt before, and has not begun the next one on all nodes."""
    supervisor = Supervisor(make_job(max_restarts=1), Mock(), Mock(), Margins())
    server = supervisor.submission.server = Mock(reached=False)
    supervisor.on(events.Heard("a", messages.AllNodes((Node(0, "a", "host-a", "127.0.0.1", 1, 0, 0, 1),))))
    supervisor.on(events.Heard("a", messages.Failed(replace(KILLED, rank=0), attempt=0)))
    server.reset_mock()
    follow = supervisor._follow

    def cancelled(*attempts: Any) -> None:
        follow(*attempts)
        supervisor.on(events.Cancel("enough", "enough"))

    monkeypatch.setattr(supervisor, "_follow", cancelled)
    supervisor.rest(4000)
    supervisor._alarm.close()
    assert [name for name, *_ in server.method_calls] == ["begin", "stop"]


def test_a_narrow_run_of_a_wide_range_keeps_what_its_ranks_may_report(tmp_path: Path) -> None:
    """A rank and the driver know the same number of ranks."""
    ranged = make_job(num_processes=64, widths=Widths(2, 64))
    narrow = changed(ranged, num_processes=2)
    writer = Writer(tmp_path / "reports", room(narrow.world_size), 0)
    for step in range(20_000):
        writer.add({"loss": float(step)}, step, None, tracked=False)
    data = (tmp_path / "reports").read_bytes()

    class Reporting:
        on_driver = False
        slots_may_come = False

        def run(self, job: Job, server: ChannelServer) -> Collected:
            supervisor.on_log(Log(0, REPORTS, 0, data))
            return Collected((NodeReport(0, "host-a", tuple(Outcome(rank, "host-a", "finished") for rank in (0, 1))),))

        def room(self, job: Job) -> int:
            return job.world_size

        def again(self, job: Job) -> Reporting:
            return self

    scheduler: Any = Reporting()
    supervisor = Supervisor(ranged, scheduler, Mock(), Margins(), lambda *_: narrow)
    assert supervisor.run(0.0).error is None
    supervisor._alarm.close()
    assert len(data) > 2 * room(64)
    assert supervisor.reports.latest == {"loss": 19_999.0}
    assert supervisor.reports.metrics.dropped == 0


def test_a_job_is_not_ended_while_output_of_its_ended_ranks_arrives() -> None:
    scheduler = Mock()
    scheduler.cancel.return_value = False
    supervisor = Supervisor(make_job(grace_period=0.1), scheduler, Mock(), Margins(stop=1.5))
    supervisor._alarm.start()
    supervisor.on(events.Heard("a", messages.AllNodes((Node(0, "a", "host-a", "127.0.0.1", 1, 0, 0, 1),))))
    supervisor.on(events.Heard("a", messages.Failed(replace(KILLED, rank=0), attempt=0)))
    for offset in range(25):
        supervisor.on_log(Log(0, 1, offset, b"x"))
        time.sleep(0.1)
    assert not scheduler.cancel.called
    watch.until(lambda: scheduler.cancel.called)
    supervisor._alarm.close()
