"""What callbacks are asked."""

import threading
import time

import pytest

from distributor.metrics.ended import EndedAttempt
from distributor.metrics.table import Row
from distributor.run.callback_thread import Callbacks
from distributor.search.sweep import _OneAtATime
from distributor.values.reports import Committed


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


def test_an_attempt_ends_before_the_rows_of_the_next_one():
    heard = []

    class Listener:
        def on_metrics(self, run, rows):
            heard.append([row.attempt for row in rows])

        def on_checkpoint(self, run, checkpoint):
            heard.append(f"saved in {checkpoint.attempt}")

        def on_attempt_end(self, run, attempt):
            heard.append(f"end of {attempt.number}")

    rows = [Row(attempt, step, 0.0, 0, {}) for attempt in (0, 1) for step in (1, 2)]
    saved = [Committed(attempt, 0.0, 1, "/kept") for attempt in (0, 1)]
    news = [[], [rows[0], saved[0], rows[1], EndedAttempt(0, 1.0, "killed"), rows[2], saved[1], rows[3]]]
    callbacks = Callbacks([Listener()], "run", lambda: news.pop(0) if news else [])
    callbacks.start(None)
    callbacks.close()
    assert heard == [[0, 0], "saved in 0", "end of 0", [1, 1], "saved in 1"]


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
