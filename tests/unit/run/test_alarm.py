"""Deadlines of a run."""

from __future__ import annotations

import threading

import watch

from distributor.run.alarm import Alarm


def test_what_is_due_is_called_in_order_in_one_thread() -> None:
    alarm, called, done = Alarm(), [], threading.Event()
    alarm.after(0.05, lambda: called.append(("last", threading.current_thread())))
    alarm.after(0.05, done.set)
    alarm.after(0.0, lambda: called.append(("first", threading.current_thread())))
    alarm.after(0.0, lambda: called.append(("second", threading.current_thread())))
    assert called == []  # nothing is done before the start
    alarm.start()
    assert done.wait(watch.DEADLINE)
    assert [name for name, _ in called] == ["first", "second", "last"]
    assert len({thread for _, thread in called}) == 1
    alarm.close()


def test_a_call_that_raises_ends_no_alarm() -> None:
    alarm, done = Alarm(), threading.Event()
    alarm.start()
    alarm.after(0.0, lambda: 1 / 0)
    alarm.after(0.0, done.set)
    assert done.wait(watch.DEADLINE)
    alarm.close()


def test_nothing_is_called_after_the_end() -> None:
    alarm, called, inside, go = Alarm(), [], threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert go.wait(watch.DEADLINE)

    alarm.start()
    alarm.after(0.0, hang)
    alarm.after(0.0, lambda: called.append("late"))
    assert inside.wait(watch.DEADLINE)
    alarm.close()  # does not wait for what hangs
    go.set()
    alarm.after(0.0, lambda: called.append("later"))
    watch.until(lambda: not any(thread.name == "distributor-alarm" for thread in threading.enumerate()))
    assert called == []


def test_of_calls_with_one_key_the_earliest_is_waited_for() -> None:
    alarm, called, done = Alarm(), [], threading.Event()
    for number in range(1000):
        alarm.after(0.2, lambda number=number: called.append(number), key="key")  # type: ignore[misc]
    assert len(alarm._due) == 1
    alarm.after(0.1, lambda: called.append("earlier"), key="key")
    alarm.after(0.3, lambda: called.append("later"), key="key")
    alarm.after(0.1, lambda: called.append("other"), key="other")
    alarm.after(0.4, done.set)
    alarm.start()
    assert done.wait(watch.DEADLINE)
    assert called == ["earlier", "other"]
    again = threading.Event()
    alarm.after(0.0, again.set, key="key")
    assert again.wait(watch.DEADLINE)
    alarm.close()
