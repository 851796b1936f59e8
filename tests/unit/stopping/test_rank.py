"""Whether a rank stops at a step, as its node's board says."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributor import ConfigurationError, StopError, runtime
from distributor.stopping import rank as stopping, vote_file
from distributor.stopping.node import NodeStop
from distributor.stopping.rank import Stopper
from distributor.stopping.vote_file import NONE, Head, Vote, VoteFile
from distributor.values.messages import Agree, Halted, Message, Propose, RankPreempted, Reached


@pytest.fixture
def path(tmp_path: Path) -> Path:
    vote_file.create(tmp_path / "board", 2, linked=True)
    return tmp_path / "board"


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


class Agent:
    """The agent's part, and what it has told the driver."""

    def __init__(self, path: Path) -> None:
        self.told: list[Message] = []
        self.answers: list[Message] = []
        self.node_stop = NodeStop(VoteFile(path), 10, 0, self.told.append, self.answers.append)


def test_a_rank_stops_where_all_have_agreed(path: Path) -> None:
    agent, ranks = Agent(path), [Stopper(VoteFile(path), local_rank) for local_rank in range(2)]
    assert not ranks[0].should_stop(5)
    agent.node_stop.on_order(Propose(1, 5))
    agent.node_stop.on_order(Propose(2, 7))
    assert agent.answers == [Reached(1, False, 5, attempt=0), Reached(2, True, 5, attempt=0)]
    assert not ranks[0].should_stop(6)
    agent.node_stop.on_order(Agree(2, 7))
    assert not ranks[1].should_stop(6)
    assert [rank.should_stop(7) for rank in ranks] == [True, True]
    assert ranks[0].should_stop(8), "it goes on, and is told again"
    agent.node_stop.look()
    agent.node_stop.look()
    assert agent.told == [Halted(10, 7, attempt=0), Halted(11, 7, attempt=0)]
    assert agent.node_stop.halted() == {0: 7, 1: 7}


def test_an_order_that_comes_late_or_twice_changes_nothing(path: Path) -> None:
    agent, rank = Agent(path), Stopper(VoteFile(path), 0)
    agent.node_stop.on_order(Propose(2, 7))
    agent.node_stop.on_order(Propose(1, 3))
    agent.node_stop.on_order(Propose(2, 7))
    assert agent.answers == [Reached(2, True, NONE, attempt=0)] * 2
    agent.node_stop.on_order(Agree(1, 3))
    assert not rank.should_stop(3)
    waiting = threading.Thread(target=rank.should_stop, args=(7,), daemon=True)
    waiting.start()
    while VoteFile(path).seats()[0].step != 7:
        time.sleep(0.001)
    agent.node_stop.on_order(Propose(2, 7))
    assert agent.answers[-1] == Reached(2, True, 7, attempt=0), "its rank waits there"
    agent.node_stop.on_order(Agree(2, 7))
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_rank_that_hears_nothing_does_not_wait_for_ever(path: Path) -> None:
    rank = Stopper(VoteFile(path), 0, patience=0.05)
    Agent(path).node_stop.on_order(Propose(1, 4))
    with pytest.raises(StopError, match=r"stop at step 4 or before, but the driver did not say within 0\.05 s"):
        rank.should_stop(4)


def test_a_waiting_rank_goes_on_if_the_step_is_moved(path: Path) -> None:
    agent, rank, answers = Agent(path), Stopper(VoteFile(path), 0), []
    agent.node_stop.on_order(Propose(1, 4))
    waiting = threading.Thread(target=lambda: answers.append(rank.should_stop(4)), daemon=True)
    waiting.start()
    while VoteFile(path).seats()[0].step != 4:
        time.sleep(0.001)
    agent.node_stop.on_order(Propose(2, 6))
    waiting.join(60)
    assert answers == [False]


def test_sigterm_is_a_request_from_the_first_call_on(path: Path) -> None:
    agent, rank = Agent(path), Stopper(VoteFile(path), 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not rank.should_stop(1)
    os.kill(os.getpid(), signal.SIGTERM)
    agent.node_stop.look()
    assert agent.told == [RankPreempted(11, attempt=0)]
    assert agent.node_stop.stop({0: 4711, 1: 4712}) == {1: 4712}


def test_a_signal_handler_may_ask_while_it_interrupts_a_call(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, answers = Stopper(VoteFile(path), 0), []
    name_step = VoteFile.name_step

    def interrupt(file: VoteFile, local_rank: int, step: int) -> None:
        monkeypatch.setattr(VoteFile, "name_step", name_step)
        answers.append(rank.should_stop(step))
        name_step(file, local_rank, step)

    monkeypatch.setattr(VoteFile, "name_step", interrupt)
    asking = threading.Thread(target=lambda: answers.append(rank.should_stop(4)), daemon=True)
    asking.start()
    asking.join(30)
    assert answers == [False, False]


def test_a_handler_of_the_user_stays(path: Path) -> None:
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    agent, rank = Agent(path), Stopper(VoteFile(path), 0)
    rank.should_stop(1)
    os.kill(os.getpid(), signal.SIGTERM)
    agent.node_stop.look()
    assert (got, agent.told, agent.node_stop.stop({0: 4711})) == ([signal.SIGTERM], [], {})


def test_a_handler_that_the_user_sets_later_is_noticed(path: Path) -> None:
    agent, rank = Agent(path), Stopper(VoteFile(path), 0)
    rank.should_stop(1)
    signal.signal(signal.SIGTERM, lambda *_: None)
    rank.should_stop(2)
    assert agent.node_stop.stop({0: 4711}) == {}


@pytest.mark.parametrize("how", ["ending", "unreachable", "forked"])
def test_sigterm_ends_what_need_not_wait(how: str, tmp_path: Path) -> None:
    vote_file.create(tmp_path / "board", 1, linked=how != "unreachable")
    pid = os.fork()
    if pid == 0:
        try:
            rank = Stopper(VoteFile(tmp_path / "board"), 0)
            rank.should_stop(1)
            if how == "ending":
                VoteFile(tmp_path / "board").end()
            if how != "forked" or os.fork() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            os.kill(os.getpid(), os.WTERMSIG(os.wait()[1]) + signal.SIGUSR1 - signal.SIGTERM)
        finally:
            os._exit(1)
    ended = os.waitpid(pid, 0)[1]
    assert os.WTERMSIG(ended) == (signal.SIGUSR1 if how == "forked" else signal.SIGTERM)


def test_a_fork_of_a_rank_never_stops(path: Path) -> None:
    rank = Stopper(VoteFile(path), 0)
    rank._owner = -1
    Agent(path).node_stop.on_order(Propose(1, 0))
    assert not rank.should_stop(1)
    assert VoteFile(path).seats()[0] == Vote()


def test_closed_descriptors_do_not_matter(path: Path) -> None:
    rank = Stopper(VoteFile(path), 0)
    rank.should_stop(1)
    descriptor = rank._vote_file._file._descriptor
    os.close(descriptor)
    with open(os.devnull, "wb"):  # has its number now
        rank.should_stop(2)
    assert VoteFile(path).seats()[0].step == 2


def test_a_board_is_looked_at_by_one_at_a_time(path: Path) -> None:
    """Locks are of processes: a child holds it."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with VoteFile(path).locked():
            os.write(ready[1], b"x")
            os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(BlockingIOError), VoteFile(path).locked(wait=False):
        pass
    os.write(go[1], b"x")
    with VoteFile(path).locked():
        assert VoteFile(path).head() == Head(linked=True)
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (-1, "step must be 0 or more, not -1"),
        (0.5, "step must be a whole number, not 0.5"),
        ("a", "step must be a whole number, not 'a'"),
        (None, "step must be a whole number, not None"),
        (torch.ones(2), "step must be a whole number, not tensor"),
    ],
)
def test_a_step_that_is_none(step: Any, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        runtime.should_stop(step)
    assert told in str(caught.value)


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), True])
def test_a_step_may_come_from_a_tensor(step: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_stopper", Stopper(VoteFile(path), 0))
    assert not runtime.should_stop(step)
    assert VoteFile(path).seats()[0].step == int(step)


def test_nothing_stops_outside_a_run() -> None:
    assert not runtime.should_stop(10)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
