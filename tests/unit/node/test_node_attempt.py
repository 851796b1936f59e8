"""What an attempt on a node does when it is stopped, or something fails around its ranks."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import watch

from distributor.node.node_attempt import Assignment, NodeAttempt, Notes, StopReason
from distributor.values import layout, messages
from distributor.values.environment import NODE_ID
from distributor.values.job import Function
from distributor.values.messages import AllPassed, RankExited, RanksStarted, Stop
from distributor.values.placement import Node, Placement
from distributor.values.plan import NodeOrder, Plan

STOP, KILL = layout.STOP_SIGNAL, signal.SIGKILL
DEAD = 1 << 30  # a pid that no process has


class FakeLauncher:
    """Records what it is sent."""

    pid = DEAD

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append(KILL)


class FakeLink:
    """Records what is told to the driver, which it reaches."""

    is_open, is_private = True, False

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, *message: Any) -> None:
        self.told.append(message[0])

    send = tell

    def orphan(self, *, lives: bool) -> None:
        self.told.append(messages.Orphaned(lives))


def make(folder: Path, ranks: int = 1) -> tuple[Any, FakeLauncher, FakeLink]:
    node = Node(1, "b", "host-b", "10.0.0.2", 1, 2, 2, ranks)
    placement = Placement((Node(0, "a", "host-a", "10.0.0.1", 1, 0, 0, 2), node))
    plan: Any = Plan(node, Function("train", b""), {}, ({},) * ranks)
    share = placement.shares(whole=False)[1]
    order = NodeOrder(
        "3f2a", plan, share, 5.0, 1.0, None, -1, str(folder), None, (), False, "fork", "/", {NODE_ID: "none"}
    )
    launcher, link = FakeLauncher(), FakeLink()
    assignment = Assignment(order, None, (), watch=False, spare=False, number=0)
    made: Any = NodeAttempt(assignment, launcher, link, None, Notes({}))  # type: ignore[arg-type]
    return made, launcher, link


Step = Callable[[Any], object]


def event(message: messages.Message) -> Step:
    return lambda attempt: attempt._on_event(message)


def order(message: messages.Message) -> Step:
    return lambda attempt: attempt.on_order(message)


started = event(RanksStarted((DEAD,), 0.0))
passed = event(AllPassed())
succeeded = event(RankExited(0, 0, None, 1.0))
stop, kill = order(Stop("cancelled")), order(Stop("killed", grace=False))
orphan: Step = NodeAttempt.on_owner_gone
sigterm: Step = NodeAttempt.on_terminated


def driver_lost(attempt: Any) -> None:
    attempt.give_up("lost the driver")


def companion_dies(attempt: Any) -> None:
    attempt._on_companion_death(3, "the companion ended")


ERROR = ("CompanionError", "the companion ended")


@pytest.mark.parametrize(
    ("steps", "stopping", "signals"),
    [
        ([started], None, []),
        ([stop], StopReason(), [STOP]),
        ([started, stop], StopReason(), [STOP]),
        ([started, stop, stop], StopReason(), [STOP]),
        ([started, stop, kill], StopReason(), [STOP, KILL]),
        ([started, kill], StopReason(), [KILL]),
        ([started, succeeded, stop], StopReason(), [KILL]),
        ([driver_lost], None, []),
        ([started, driver_lost], StopReason("lost the driver"), [STOP]),
        ([started, stop, driver_lost], StopReason("lost the driver"), [STOP]),
        ([started, succeeded, driver_lost], None, []),
        ([started, sigterm], StopReason("got SIGTERM"), [STOP]),
        ([started, stop, sigterm], StopReason(), [STOP]),
        ([started, orphan], StopReason(), [STOP]),
        ([started, succeeded, orphan], None, []),
        ([started, passed, orphan], None, []),
        ([started, companion_dies], StopReason(error=ERROR), [STOP]),
        ([started, stop, companion_dies], StopReason(), [STOP]),
        ([started, companion_dies, driver_lost], StopReason("lost the driver", ERROR), [STOP]),
        ([started, passed, companion_dies], None, []),
    ],
)
def test_what_stops_an_attempt(
    steps: list[Step], stopping: StopReason | None, signals: list[int], tmp_path: Path
) -> None:
    async def play() -> None:
        attempt, launcher, _ = make(tmp_path)
        for step in steps:
            step(attempt)
        assert attempt._stopping == stopping
        assert launcher.signals == signals

    asyncio.run(play())


@pytest.mark.parametrize(
    ("steps", "signals"),
    [
        ([event(RanksStarted((), 0.0)), stop], []),  # until the other nodes have ended
        ([event(RanksStarted((), 0.0)), stop, kill], [KILL]),
        ([event(RanksStarted((), 0.0)), companion_dies], [STOP]),
        ([stop], [STOP]),
    ],
)
def test_a_node_without_ranks_serves_the_others_until_its_companion_dies(
    steps: list[Step], signals: list[int], tmp_path: Path
) -> None:
    async def play() -> None:
        attempt, launcher, _ = make(tmp_path, ranks=0)
        for step in steps:
            step(attempt)
        assert launcher.signals == signals

    asyncio.run(play())


def test_a_stop_waits_for_stacks_and_stays_hasty(tmp_path: Path) -> None:
    async def play() -> None:
        attempt, launcher, link = make(tmp_path)
        for step in (started, order(messages.Dump(1, False, 0.0)), order(Stop("another waits", hasty=True))):
            step(attempt)
        assert (launcher.signals, attempt._ranks.hurried) == ([], set())
        await attempt._dumps._after
        assert isinstance(link.told[-1], messages.StackDump)
        assert launcher.signals == [layout.FAST_KILL_SIGNAL]
        while attempt._ranks.hurried != {0}:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(play(), watch.DEADLINE))


def test_the_driver_hears_of_a_companion_that_died_before_the_stop(tmp_path: Path) -> None:
    async def play() -> None:
        attempt, _, link = make(tmp_path)
        for step in (started, companion_dies):
            step(attempt)
        assert link.told == [messages.Started(attempt=0), messages.Failed(attempt=0)]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("steps", "lives"), [([started], False), ([started, succeeded], True), ([started, passed], True)]
)
def test_an_attempt_without_owner_goes_on_if_it_can_still_succeed(
    steps: list[Step], lives: bool, tmp_path: Path
) -> None:
    async def play() -> None:
        attempt, _, _ = make(tmp_path)
        for step in steps:
            step(attempt)
        assert attempt.on_owner_gone() is lives

    asyncio.run(play())


class WithoutFiles(NodeAttempt):
    """An attempt whose agent may open no further file."""

    def __init__(self, folder: Path) -> None:
        self._assignment = Mock()
        self._assignment.order.folder = folder
        self._assignment.order.plan.node.local_world_size = 1
        self._link, self._logs, self._ranks = Mock(is_open=True), Mock(), Mock()
        self._logs.follow = self._ranks.node_stop.follow = asyncio.Event().wait

    async def _run_processes(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)  # the tasks that follow output have begun
        raise OSError(24, "Too many open files")


def test_an_attempt_that_cannot_start_leaves_no_exception_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(WithoutFiles(tmp_path).run())
    gc.collect()
    assert layout.vote_file(tmp_path).exists()
    assert [record.getMessage() for record in caplog.records] == []
