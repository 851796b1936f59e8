"""Signals that come while the launcher notes what has become of a rank."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from distributor.node.launcher import _Signals


@pytest.fixture
def signals() -> Iterator[_Signals]:
    made = _Signals()
    before = signal.signal(signal.SIGUSR1, made.handle)
    yield made
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_an_exception_at_once(signals: _Signals) -> None:
    with pytest.raises(SignalException, match=f"got signal {signal.SIGUSR1.value}"):
        os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("masked", [False, True])
def test_a_signal_waits_until_what_must_not_be_cut_is_done(signals: _Signals, masked: bool) -> None:
    """Also one that this thread masks: another thread takes it, as the store's does, and Python handles it here."""
    go, sent, done = threading.Event(), threading.Event(), []

    def send() -> None:
        go.wait(30)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        sent.set()

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(SignalException), signals.held():
        if masked:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        go.set()
        assert sent.wait(30)
        sender.join(30)
        done.append(sum(range(1000)))  # here Python would run the handler
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert done
    os.sched_yield()  # nothing is raised twice
