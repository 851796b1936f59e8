"""The launcher's main thread: what others ask of it, and that it waits for nobody."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from distributor.channel.rank_slots import RankSlots, Slot
from distributor.node import rank_state
from distributor.node.rank_supervisor import HANDLED, RankSupervisor
from distributor.values import layout, messages
from distributor.values.job import Function, Script, Target
from distributor.values.outcome import Ending, Failure, Outcome
from distributor.values.placement import Node, Placement
from distributor.values.plan import NodeOrder, Plan

DEADLINE = 60.0


class Ranks(RankSupervisor):
    """Ranks that are children of this process and do what they are told here."""

    def __init__(
        self,
        *does: Callable[[], object],
        grace: float = DEADLINE,
        serving: tuple[int, ...] = (),
        target: Target = Script("train.py", b""),
    ) -> None:
        node = Node(0, "host-a:1", "host-a", "10.0.0.1", 4000, leader=0, first_rank=0, local_world_size=len(does))
        plan: Any = Plan(node, target, {}, ({},) * len(does), serving=serving)
        self.told: list[messages.Message] = []
        self.does = does
        where = ("/", None, (), False, "spawn", "/", {})
        self.slots = RankSlots(len(does))
        order = NodeOrder(
            "3f2a",
            plan,
            Placement((node,)).shares(whole=False)[0],
            grace,
            1.0,
            None,
            -1,
            *where,
            slots_fd=self.slots.descriptor,
        )
        super().__init__(order, self.told.append)
        self.thread = threading.Thread(target=self.meet, daemon=True)

    def meet(self) -> None:
        """What torch's agent does in the other thread."""
        self.begin()
        while not self.stopping and None in self.await_end(0.1).values():
            continue
        if self.stopping:
            self.stop()
        self.end()

    def meet_servers(self) -> None:
        """The same, where some ranks serve the others."""
        self.begin()
        self.await_end(DEADLINE)
        if self.stopping or self._state.has_failed:
            self.stop()
        else:
            self.release()
        self.end()

    def _spawn(self, local_rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            for number in HANDLED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            self.does[local_rank]()
            os._exit(0)
        return pid

    def exits(self) -> dict[int, messages.RankExited]:
        return {each.local_rank: each for each in self.told if isinstance(each, messages.RankExited)}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in HANDLED}
    descriptor = signal.set_wakeup_fd(-1)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(descriptor)


def wait() -> None:
    signal.pause()


def fail() -> None:
    os._exit(3)


def test_all_ranks_end() -> None:
    ranks = Ranks(int, int)
    ranks.thread.start()
    ranks.run()
    assert {rank: (exit.code, exit.stopped) for rank, exit in ranks.exits().items()} == {0: (0, None), 1: (0, None)}
    assert isinstance(ranks.told[0], messages.RanksStarted)


def test_ranks_that_serve_end_as_successes_once_the_others_have() -> None:
    ranks = Ranks(int, wait, serving=(1,))
    ranks.thread = threading.Thread(target=ranks.meet_servers, daemon=True)
    ranks.thread.start()
    ranks.run()
    assert {rank: (exit.code, exit.stopped) for rank, exit in ranks.exits().items()} == {0: (0, None), 1: (0, None)}
    assert [ranks.exits()[rank].released is None for rank in (0, 1)] == [True, False]


def test_ranks_that_serve_were_released_at_one_moment_however_late_they_end() -> None:
    readable, writable = os.pipe()

    def ignore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(writable, b"1")
        wait()

    ranks = Ranks(lambda: os.read(readable, 1), ignore, wait, serving=(1, 2))

    def tell(message: messages.Message) -> None:
        ranks.told.append(message)
        if isinstance(message, messages.RankExited) and message.local_rank == 2:
            os.kill(ranks._processes[1].pid, signal.SIGKILL)

    ranks._tell = tell
    ranks.thread = threading.Thread(target=ranks.meet_servers, daemon=True)
    ranks.thread.start()
    ranks.run()
    exits = ranks.exits()
    assert exits[2].moment < exits[1].moment
    assert exits[1].released == exits[2].released is not None
    os.close(readable)
    os.close(writable)


def test_a_function_that_leaves_with_code_0_before_it_returns_stops_the_others() -> None:
    ranks = Ranks(int, wait, target=Function("train", b""))
    ranks.thread.start()
    ranks.run()
    exits = ranks.exits()
    assert (exits[0].code, exits[0].early, exits[0].succeeded) == (0, True, False)
    assert exits[1].stopped is not None


def test_a_node_whose_ranks_have_ended_waits_for_news() -> None:
    """And does not look at its store all the time, while other nodes train on."""
    ranks = Ranks(int)
    ranks.thread.start()
    ranks.run()
    before = time.monotonic()
    assert ranks.await_end(0.05, known=True) == {0: True}
    assert time.monotonic() - before >= 0.05


@pytest.mark.parametrize("does", [(wait, fail), (fail, wait)])
def test_a_failure_beside_ranks_that_serve_is_one(does: Any) -> None:
    ranks = Ranks(*does, serving=(1,))
    ranks.thread = threading.Thread(target=ranks.meet_servers, daemon=True)
    ranks.thread.start()
    ranks.run()
    failed = does.index(fail)
    assert (ranks.exits()[failed].code, ranks.exits()[failed].stopped) == (3, None)
    assert ranks.exits()[1 - failed].stopped is not None


def test_a_rank_that_fails_is_told_and_the_others_are_stopped() -> None:
    ranks = Ranks(wait, fail)
    ranks.thread.start()
    ranks.run()
    exits = ranks.exits()
    assert (exits[1].code, exits[1].stopped) == (3, None)
    assert exits[0].code == -signal.SIGTERM
    assert exits[0].stopped is not None
    assert exits[1].moment <= exits[0].stopped <= exits[0].moment


def test_nothing_waits_for_a_thread_that_waits_for_the_network() -> None:
    ranks = Ranks(wait, fail)

    def meet() -> None:
        ranks.begin()
        threading.Event().wait()  # a store that never answers

    threading.Thread(target=meet, daemon=True).start()
    ranks.run()
    assert sorted(ranks.exits()) == [0, 1]


def test_a_rank_that_ignores_the_signal_is_killed_after_its_grace_period() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()

    ranks = Ranks(ignore, fail, grace=0.2)
    ranks.thread.start()
    ranks.run()
    assert ranks.exits()[0].code in (-signal.SIGKILL, -signal.SIGTERM)  # it may not have come to ignore it


@pytest.mark.parametrize("masked", [False, True])
def test_a_signal_stops_the_ranks_whichever_thread_takes_it(masked: bool) -> None:
    """The store's C++ thread takes a signal that the main thread has masked."""
    ranks = Ranks(wait)
    ranks.handle_signals()

    def send() -> None:
        while not ranks.told:
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), layout.STOP_SIGNAL)

    sender = threading.Thread(target=send)
    ranks.thread.start()
    sender.start()
    if masked:
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        ranks.run()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        sender.join(DEADLINE)
    assert ranks.exits()[0].stopped is not None


def test_sigterm_from_outside_is_for_the_agent_to_decide_about() -> None:
    ranks = Ranks(wait)
    ranks.handle_signals()

    def tell(message: messages.Message) -> None:
        ranks.told.append(message)
        if isinstance(message, messages.RanksStarted):
            os.kill(os.getpid(), signal.SIGTERM)
        elif isinstance(message, messages.Terminated):
            assert not ranks.stopping
            os.kill(os.getpid(), layout.STOP_SIGNAL)

    ranks._tell = tell
    ranks.thread.start()
    ranks.run()
    assert messages.Terminated() in ranks.told
    assert ranks.exits()[0].code == -signal.SIGTERM


def test_a_rank_that_is_killed_before_it_begins_was_started() -> None:
    ranks = Ranks(int)
    ranks._start(lambda: ranks._spawn(0))
    threading.Thread(target=lambda: ranks.await_end(DEADLINE) and ranks.end(), daemon=True).start()
    ranks.run()
    assert [type(each) for each in ranks.told] == [messages.RanksStarted, messages.RankExited]


BROKEN = Failure(0, 0, "host-a", "RuntimeError", "RuntimeError: Connection closed by peer")


def say(ranks: Ranks, failure: Failure) -> None:
    """A rank reports why it fails, and leaves."""
    ending = Ending(Outcome(failure.rank, failure.host, "failed", failure), time.monotonic())
    Slot(ranks.slots.descriptor, failure.local_rank).write(pickle.dumps(ending))
    os._exit(1)


@pytest.mark.parametrize("later", [True, False])
def test_a_rank_that_has_lost_its_connection_to_another_stops_it_only_after_a_moment(later: bool) -> None:
    readable, writable = os.pipe()
    ranks = Ranks(lambda: say(ranks, BROKEN), lambda: os.read(readable, 1) and fail() if later else wait())

    def tell(message: messages.Message) -> None:
        ranks.told.append(message)
        if isinstance(message, messages.RankExited) and message.local_rank == 0:
            os.write(writable, b"1")

    ranks._tell = tell
    ranks.thread.start()
    ranks.run()
    other = ranks.exits()[1]
    assert (other.code, other.stopped is None) == ((3, True) if later else (-signal.SIGTERM, False))
    os.close(readable)
    os.close(writable)


def test_a_rank_that_fails_by_itself_stops_the_others_at_once() -> None:
    ranks = Ranks(lambda: say(ranks, replace(BROKEN, kind="ValueError")), wait)
    ranks.thread.start()
    ranks.run()
    first, other = ranks.exits()[0], ranks.exits()[1]
    assert other.stopped is not None and other.stopped - first.moment < 0.5 * rank_state.PATIENCE
