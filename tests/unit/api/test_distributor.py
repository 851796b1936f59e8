"""Ctrl-C in the first instants of a run: whichever line it comes in, no run goes on without a handle."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import watch

from distributor import RunCancelledError, TorchDistributor
from distributor.api import distributor as api
from distributor.channel.server import ChannelServer
from distributor.display import display
from distributor.run import handle
from distributor.schedulers.local import LocalScheduler
from distributor.values.job import Job
from distributor.values.outcome import Collected

#: Whose lines are interrupted: what the caller's thread runs while a run begins.
FILES = {module.__file__ for module in (api, handle, display)}


class Idle(LocalScheduler):
    """Runs nothing, until it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def run(self, job: Job, server: ChannelServer) -> Collected:
        self.ended.wait()
        raise RunCancelledError("cancelled")

    def cancel(self) -> None:
        self.ended.set()


class Lines:
    """Counts the lines of a thread from when a run is made, and does something before one of them.

    Args:
        number: which line; ``None`` for none.
        act: what is done there.
        waits: called when the thread comes to wait for the run, if nothing was done before.
    """

    def __init__(
        self, number: int | None, act: Callable[[], None] = lambda: None, waits: Callable[[], None] = lambda: None
    ) -> None:
        self.seen = -1  # until a run is made
        self._number = number
        self._act = act
        self._waits = waits
        self._stopped = False

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES or self._stopped:
            return None
        if event == "call" and frame.f_code is handle.Run.wait.__code__:
            self._waits()
        elif event == "return" and frame.f_code is handle.Run.__init__.__code__:
            self.seen = 0
        elif event == "line" and self.seen >= 0:
            self.seen += 1
            if self.seen - 1 == self._number:
                self._stopped = True
                self._act()
        return self


def traced(lines: Lines, call: Callable[[], object]) -> object:
    """Calls with a trace. What the collector runs of earlier tests' handles, whose exceptions Python drops, is none."""
    gc.collect()
    gc.disable()
    sys.settrace(lines)
    try:
        return call()
    finally:
        sys.settrace(None)
        gc.enable()


def raise_it() -> None:
    raise KeyboardInterrupt


def send_it() -> None:
    signal.raise_signal(signal.SIGINT)


def going() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distributor-run"]


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Idle]]:
    made: list[Idle] = []

    def choose(*_: Any) -> Idle:
        made.append(Idle())
        return made[-1]

    monkeypatch.setattr(api, "choose_scheduler", choose)
    yield made
    for scheduler in made:
        scheduler.cancel()
    watch.until(lambda: not going())


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("run", raise_it),
        pytest.param("submit", send_it, marks=pytest.mark.long),
        pytest.param("run", send_it, marks=pytest.mark.long),
        pytest.param("submit", raise_it, marks=pytest.mark.long),
        *(
            pytest.param(name, act, marks=pytest.mark.long)
            for name in ("run_module", "submit_module")
            for act in (raise_it, send_it)
        ),
    ],
)
def test_an_interrupt_leaves_no_run_without_a_handle(
    name: str, act: Callable[[], None], schedulers: list[Idle], monkeypatch: pytest.MonkeyPatch
) -> None:
    distributor = TorchDistributor(1, True, False, grace_period=0, progress=False)
    method: Any = getattr(distributor, name)

    def call() -> object:
        return method("json.tool" if name.endswith("module") else print)

    counted: list[int] = []
    lines = Lines(None, waits=lambda: (counted.append(lines.seen), schedulers[-1].cancel())[0])
    try:
        run: Any = traced(lines, call)
        schedulers[-1].cancel()
        assert run.wait(watch.DEADLINE)
    except RunCancelledError:
        pass
    last = counted[0] if counted else lines.seen
    assert last > 8
    interrupted = 0
    for number in range(last):
        watch.until(lambda: not going())
        lines = Lines(number, act, lambda: schedulers[-1].cancel())
        try:
            run = traced(lines, call)
        except KeyboardInterrupt:
            interrupted += 1
            continue
        except RunCancelledError:
            pass
        # A thread was faster this time, so that there were fewer lines.
        assert lines.seen <= number
        schedulers[-1].cancel()
        watch.until(lambda: not going(), 10.0)
    assert interrupted > 8
