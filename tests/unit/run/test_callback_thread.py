"""What callbacks are asked."""

import threading
import time

import pytest

from distributor.run.callback_thread import Callbacks
from distributor.search.sweep import _OneAtATime


class Tracker:
    def __init__(self, run):
        self.run = run

    def run_for_ranks(self, run, environ, wanted):
        return self.run


def test_rank_0_joins_the_run_of_the_first_callback_that_knows_one():
    lock = threading.Lock()
    for callbacks in ([Tracker(""), Tracker(None), Tracker("a"), Tracker("b")], [Tracker("")], [object()]):
        for each in (callbacks, [_OneAtATime(callback, lock) for callback in callbacks]):
            known = Callbacks(each, "run", lambda: ()).run_for_ranks(None, {}, lambda: True)
            assert known == ("a" if len(callbacks) == 4 else "")


def test_nobody_waits_for_a_thread_that_could_not_be_started(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    callbacks = Callbacks([object()], "run", lambda: ())
    with monkeypatch.context() as broken, pytest.raises(RuntimeError):
        broken.setattr(threading.Thread, "start", refuse)
        callbacks.start(None)
    before = time.monotonic()
    callbacks.close()
    assert time.monotonic() - before < 10.0
