"""The handle of a run beside its ranks: what it says of a driver that is out of reach, and views that do not work."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import watch
from jobs import make_job

from distributor import NodeLostError, RunCancelledError, StartError, Status, TrainingError
from distributor.channel import connections
from distributor.channel.server import ChannelServer
from distributor.display.logs import Logs
from distributor.display.snapshot import Snapshot
from distributor.display.view import Shown
from distributor.launch import Accelerate, DeepSpeed
from distributor.launch.deepspeed.config import ResolvedConfig
from distributor.launch.torchrun import Torchrun
from distributor.outcomes import advice
from distributor.run import callback_thread, handle as module, supervisor
from distributor.run.lease import Lease
from distributor.run.margins import Margins
from distributor.text import notices
from distributor.values import messages
from distributor.values.job import Job, StatusDetail
from distributor.values.launch_path import LaunchPath
from distributor.values.outcome import UNCAUGHT, Collected, Failure, Log, NodeReport, Outcome
from distributor.values.placement import Node, NodeFacts
from distributor.values.plan import Endpoint


class Scheduler:
    """Listens as Spark's does, and has no tasks."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.waits: StatusDetail | None = StatusDetail("waiting for 2 task slots", ": 1 is free")
        self.asked = 0
        self.at: Endpoint | None = None
        self.collected = Collected()
        self.error: Exception | None = None

    on_driver = False
    reports_slots = True

    def thread(self, target: Any) -> threading.Thread:
        return threading.Thread(target=target)

    def run(self, job: Job, server: ChannelServer) -> Collected:
        self.at = server.listen("127.0.0.1", "127.0.0.1", None)
        self.ended.wait(watch.DEADLINE)
        if self.error is not None:
            raise self.error
        return self.collected

    def cancel(self) -> None:
        self.ended.set()

    def waiting_for(self) -> StatusDetail | None:
        self.asked += 1
        return self.waits


@contextmanager
def running(scheduler: Scheduler, view: Any = None, **margins: float) -> Iterator[module.Run]:
    run = module.Run(make_job(num_processes=2), scheduler, view=view, margins=Margins(**margins)).start()
    try:
        yield run
    finally:
        run.cancel()
        assert run.wait(watch.DEADLINE)
        assert run.status is Status.CANCELLED
        with pytest.raises(RunCancelledError):
            run.result()


def test_a_callback_that_ends_the_run_gets_its_result_while_the_run_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callback_thread, "PATIENCE", 5.0)
    told: list[Any] = []

    class Impatient:
        def on_start(self, run: module.Run) -> None:
            told.append(run.wait(0.1))
            run.cancel()
            try:
                run.result()
            except RunCancelledError:
                told.append(run._life.done.is_set())

    run = module.Run(make_job(), Scheduler(), callbacks=[Impatient()]).start()
    assert run.wait(watch.DEADLINE)
    assert told == [False, False]


def test_the_active_runs_of_a_process_are_listed_in_the_order_of_their_start() -> None:
    with running(Scheduler()) as first, running(Scheduler()) as second:
        assert module.active_runs() == [first, second]
    assert module.active_runs() == []


def test_a_run_that_was_withdrawn_before_it_began_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    run = module.Run(make_job(), Scheduler())
    with monkeypatch.context() as broken, pytest.raises(StartError, match="no further thread"):
        broken.setattr(threading.Thread, "start", refuse)
        run.start()
    assert module.active_runs() == []


def test_errors_of_a_named_run_show_its_name() -> None:
    run = module.Run(make_job(num_processes=2, name="digits"), Scheduler()).start()
    with pytest.raises(TimeoutError, match=r"run digits \(3f2a\) has not ended"):
        run.result(0)
    run.cancel()
    with pytest.raises(RunCancelledError, match=r"run digits \(3f2a\) was cancelled"):
        run.result(watch.DEADLINE)


@pytest.mark.parametrize("heard", ["facts", "importing"])
def test_a_task_that_was_heard_is_no_reason_to_warn(heard: str, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler()
    scheduler.waits = None
    with running(scheduler, look=0.01, unreached=watch.DEADLINE) as run:
        at = watch.until(lambda: scheduler.at)
        events = {
            "facts": messages.TaskFacts("", 0, "", NodeFacts(0, "a", "host-a", "10.0.0.1", 1)),
            "importing": messages.Importing("a", 2, "torch"),
        }
        with connections.connect((at.host, at.port, at.certificate, at.token), 5.0) as line:
            line.sendall(connections.pack(events[heard]))
            watch.until(lambda: run._supervisor.server is not None and run._supervisor.server.reached)
            asked = scheduler.asked
            assert not run.wait(0.3)
            assert scheduler.asked <= asked + 1
    assert caplog.text == ""


def test_what_nodes_import_is_said_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler()
    with running(scheduler) as run:
        for node in ("a", "b"):
            run._supervisor.on_message(node, messages.Importing(node, 2, "torch"))
        shown = run.snapshot()
        assert shown.detail == "importing torch on 2 nodes"
        watch.until(lambda: run.snapshot().lasting > 0.2)
        run._supervisor.on_message("a", hello())
        shown = run.snapshot()
        assert shown.status is Status.STARTING
        assert shown.detail == "importing torch on 1 node"  # of the one that has told the placement
        assert shown.lasting > 0.2  # the same step as before
        run._supervisor.on_message("b", messages.Importing("b", 2, ""))
        assert run.snapshot().detail == "starting ranks: they are up on 0 of 1 node"
        assert run.snapshot().lasting < 0.2
        run.cancel()
        scheduler.ended.set()


def test_an_import_that_takes_too_long_is_the_reason_of_the_start_timeout() -> None:
    scheduler = Scheduler()
    run = module.Run(make_job(num_processes=2, start_timeout=0.5), scheduler).start()
    run._supervisor.on_message("a", messages.Importing("a", 2, "deepspeed"))
    told = r"did not start within start_timeout=0.5 s: it was importing deepspeed on 1 of 2 nodes"
    with pytest.raises(StartError, match=told):
        run.result(watch.DEADLINE)


def test_a_name_is_told_wherever_the_run_is() -> None:
    scheduler = Scheduler()
    scheduler.ended.set()
    run = module.Run(make_job(num_processes=2, name="digits"), scheduler).start()
    assert run.wait(watch.DEADLINE)
    assert run.name == "digits"
    assert repr(run) == "<Run digits (3f2a): 2 processes, failed>"
    assert run.snapshot().label == "digits (3f2a)"


@pytest.mark.parametrize(
    ("configure", "shown"),
    [
        (lambda logger: None, "[distributor] the node on b removes files\n"),
        (lambda logger: logger.addHandler(logging.NullHandler()), ""),
        (lambda logger: logger.addHandler(user_handler()), "distributor:the node on b removes files\n"),
    ],
)
def test_warnings_say_who_speaks_unless_the_user_has_configured_logging(
    configure: Any, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # what logging.warning() of another thread would call
    monkeypatch.setattr(notices.logger, "handlers", list(notices.logger.handlers))
    configure(notices.logger)
    gc.collect()  # runs of tests before this one, whose results nobody has asked for
    capsys.readouterr()
    with running(Scheduler()) as run:
        run._supervisor.on_message("b", messages.Warnings("b", ("removes files",)))
    assert capsys.readouterr().err == shown
    notices.logger.warning("and after\nthe run")
    after = {"": "", "d": "distributor:and after\nthe run\n", "[": "[distributor] and after\n[distributor] the run\n"}
    assert capsys.readouterr().err == after[shown[:1]]


def user_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s:%(message)s"))
    return handler


def hello() -> messages.AllNodes:
    return messages.AllNodes((Node(0, "a", "host-a", "1", 1, 0, 0, 1),))


def test_what_a_run_waits_for_is_known() -> None:
    scheduler = Scheduler()
    with running(scheduler, patience=0.0) as run:
        watch.until(lambda: run.snapshot().detail == "waiting for 2 task slots: 1 is free")
        before = scheduler.asked
        for _ in range(100):
            run.snapshot()
        assert scheduler.asked - before <= 2  # Spark is not asked each time


class Recorder:
    """A view that takes note of what it is shown."""

    interval = 0.01
    announces = False

    def __init__(self) -> None:
        self.shown: list[tuple[Snapshot, bool]] = []

    def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
        self.shown.append((snapshot, awaited))
        return Shown()


def test_the_last_that_a_view_is_shown_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # A display that is slow to close leaves a view time to show the end again.
    monkeypatch.setattr(Logs, "close", lambda logs: threading.Event().wait(20 * Recorder.interval))
    view = Recorder()
    with running(Scheduler(), view) as run:
        watch.until(lambda: len(view.shown) > 2)
        assert not any(awaited for _, awaited in view.shown)
        assert not run.wait(0.1)
        assert view.shown[-1][1]
    assert [snapshot.status for snapshot, _ in view.shown].count(Status.CANCELLED) == 1
    assert view.shown[-1][0].status is Status.CANCELLED


def test_the_status_is_gone_when_a_caller_no_longer_waits() -> None:
    """What it writes next would stand among the lines of the status."""

    class Below(Recorder):
        def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
            super().show(snapshot, awaited)
            return Shown(footer=("running",) if awaited else ())

    with running(Scheduler(), view := Below()) as run:
        assert not run.wait(0.5)
        assert not run._display.logs.has_footer
        assert any(awaited for _, awaited in view.shown)


FAILED = NodeReport(0, "a", (Outcome(0, "a", "failed", Failure(0, 0, "a", "KeyError", "KeyError: 'lr'")),))


def test_advice_that_cannot_be_had_hides_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Scheduler):
        def run(self, job: Job, server: ChannelServer) -> Collected:
            return Collected((FAILED,))

    monkeypatch.setattr(advice, "advise", lambda *_: 1 / 0)
    run = module.Run(make_job(), Failing()).start()
    with pytest.raises(TrainingError, match="KeyError: 'lr'"):
        run.result(watch.DEADLINE)


def test_a_verdict_that_cannot_be_had_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("a field of the wrong type")

    monkeypatch.setattr(supervisor, "verdict", fail)
    scheduler = Scheduler()
    scheduler.ended.set()
    run = module.Run(make_job(), scheduler).start()
    with pytest.raises(StartError, match="TypeError: a field of the wrong type"):
        run.results(watch.DEADLINE)
    assert run.status is Status.FAILED


class Failing(Scheduler):
    """Its only rank fails, once it is to end."""

    def run(self, job: Job, server: ChannelServer) -> Collected:
        super().run(job, server)
        return Collected((FAILED,))


@pytest.mark.parametrize(
    ("launch", "told"),
    [
        (Torchrun(), None),
        (Accelerate("a.yaml"), None),
        (DeepSpeed(), None),
        (DeepSpeed({}, resolved=ResolvedConfig('{"a": 1}', "{}")), {"a": 1}),
    ],
)
def test_only_a_run_with_deepspeed_has_its_configuration(launch: LaunchPath, told: dict[str, int] | None) -> None:
    run = module.Run(make_job(launch=launch), Failing())
    assert run.deepspeed_config == told


def test_a_failure_that_nobody_waits_for_is_told_in_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    gc.collect()  # runs of other tests say it now, and not below
    capfd.readouterr()
    scheduler = Failing()
    run = module.Run(make_job(), scheduler).start()
    scheduler.ended.set()
    assert run.wait(watch.DEADLINE)
    (line,) = capfd.readouterr().err.splitlines()
    told = "[distributor] run 3f2a has failed"
    assert line == f"{told}: rank 0 on a failed: KeyError: 'lr' (result() raises the full error)"
    del run
    gc.collect()
    assert (
        capfd.readouterr().err == f"{told}, and no caller has received the error: rank 0 on a failed: KeyError: 'lr'\n"
    )


def test_a_failure_that_somebody_waits_for_is_raised_and_no_more(capfd: pytest.CaptureFixture[str]) -> None:
    scheduler = Failing()
    run = module.Run(make_job("5ec0", 1), scheduler).start()
    threading.Timer(0.1, scheduler.ended.set).start()
    for _ in range(2):
        with pytest.raises(TrainingError, match="KeyError: 'lr'") as caught:
            run.result(watch.DEADLINE)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [frame.name for frame in frames] == [frames[0].name, "result", "_await"]
    del run, caught
    gc.collect()  # which may also say what became of the runs of other tests
    assert "5ec0" not in capfd.readouterr().err


def test_what_no_error_tells_is_shown_in_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    with running(Scheduler()) as run:
        run._supervisor.on_log(Log(0, UNCAUGHT, 0, b"Traceback ...\nKeyError: 'lr'\n"))
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "[rank 0 ?] Traceback ...\n[rank 0 ?] KeyError: 'lr'\n"


def test_the_status_says_which_rank_has_failed_while_others_save() -> None:
    run = module.Run(make_job(num_processes=2, grace_period=600.0), Failing()).start()
    run._supervisor.on_message("a", messages.AllNodes((Node(0, "a", "a", "1", 1, 0, 0, 2),)))
    run._supervisor.on_message("a", messages.Failed(FAILED.outcomes[0].failure, attempt=0))  # type: ignore[arg-type]
    assert run.snapshot().detail.startswith("rank 0 failed: KeyError: 'lr'; ranks have 600 s")
    run.kill()
    assert run.wait(watch.DEADLINE)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("message", "kind"), [("RuntimeError: Connection reset by peer", NodeLostError), ("ValueError: no", TrainingError)]
)
def test_a_lost_node_is_the_cause_of_what_its_loss_breaks(message: str, kind: type[Exception], live: bool) -> None:
    """Which of the two the driver hears first is chance."""
    failure = Failure(0, 0, "a", message.partition(":")[0], message)
    scheduler = Scheduler()
    if not live:
        scheduler.collected = Collected((NodeReport(0, "a", (Outcome(0, "a", "failed", failure),)),))
    run = module.Run(make_job(num_processes=2), scheduler).start()
    for name in "ab":
        run._supervisor.on_message(name, messages.AllNodes((Node(0, "a", "a", "1", 1, 0, 0, 1),)))
    if live:
        run._supervisor.on_message("a", messages.Failed(failure, attempt=0))
        scheduler.error = RunCancelledError("the job has ended")
    run._supervisor.on_lost("b", "its agent died")
    scheduler.ended.set()
    with pytest.raises(TrainingError) as caught:
        run.result(watch.DEADLINE)
    assert type(caught.value) is kind


def test_what_has_failed_is_not_cancelled() -> None:
    run = module.Run(make_job(grace_period=600.0), Failing()).start()
    run._supervisor.on_message("a", messages.AllNodes((Node(0, "a", "a", "1", 1, 0, 0, 1),)))
    run._supervisor.on_message("a", messages.Failed(attempt=0))
    run.cancel()
    assert run.status is Status.STOPPING
    run.kill()
    with pytest.raises(TrainingError, match="KeyError: 'lr'"):
        run.result(watch.DEADLINE)
    assert run.status is Status.FAILED


def test_an_end_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, go = threading.Event(), threading.Event()
    monkeypatch.setattr(Logs, "close", lambda logs: (closing.set(), go.wait(watch.DEADLINE)))
    scheduler = Scheduler()
    scheduler.ended.set()
    run = module.Run(make_job(), scheduler).start()
    assert closing.wait(watch.DEADLINE)
    ended = run.status
    assert ended is Status.FAILED
    run.cancel()
    run.kill()
    assert run.status is ended
    assert not run._supervisor._alarm._due
    go.set()
    assert run.wait(watch.DEADLINE)
    assert run.status is ended


def test_a_handle_is_live_until_the_end_was_shown() -> None:
    class Echo(Recorder):
        def show_again(self, snapshot: Snapshot) -> bool:
            return True

    with running(Scheduler(), Echo()) as run:
        run._ipython_display_()
    with pytest.raises(NotImplementedError):
        run._ipython_display_()
    with running(Scheduler()) as run, pytest.raises(NotImplementedError):
        run._ipython_display_()


def test_a_view_that_fails_ends_no_run() -> None:
    class Broken(Recorder):
        def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
            super().show(snapshot, awaited)
            raise OSError("the display is gone")

    view = Broken()
    with running(Scheduler(), view):
        watch.until(lambda: len(view.shown) > 2)


def test_a_view_that_hangs_holds_up_no_run() -> None:
    class Stuck(Recorder):
        hanging = threading.Event()

        def show(self, snapshot: Snapshot, awaited: bool) -> Shown:
            super().show(snapshot, awaited)
            if len(self.shown) > 1:  # the first is in the thread that submits
                self.hanging.wait(watch.DEADLINE)
            return Shown()

    view = Stuck()
    with running(Scheduler(), view):
        watch.until(lambda: len(view.shown) > 1)
    view.hanging.set()


def test_an_end_that_cannot_be_told_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler()
    run = module.Run(make_job(), scheduler).start()
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(run, "_tell_end", lambda: 1 / 0)
    run.cancel()
    assert run.wait(watch.DEADLINE)
    assert run._display.logs.note not in [*notices._handler.displays]


def test_a_run_that_cannot_begin_leaves_no_display() -> None:
    class Stopped(Scheduler):
        def thread(self, target: Any) -> threading.Thread:
            raise RuntimeError("the context was stopped")

    before = list(notices._handler.displays)
    with pytest.raises(RuntimeError, match="the context was stopped"):
        module.Run(make_job(), Stopped()).start()
    assert notices._handler.displays == before


def test_a_job_that_cannot_be_ended_at_once_is_ended_soon() -> None:
    class Starting(Scheduler):
        refused = 0

        def cancel(self) -> bool:
            self.refused += 1
            if self.refused < 3:
                return True
            self.ended.set()
            return False

    scheduler = Starting()
    with running(scheduler, again=0.01):
        watch.until(lambda: scheduler.at)
    assert scheduler.refused == 3


def test_a_run_that_is_asked_to_stop_still_waits_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks stop once they are up; a cancelled run waits no longer."""
    entered, wanted = threading.Event(), list[Callable[[], bool]]()

    @contextmanager
    def hold(job: Job, waits: Callable[[], bool], displace: object) -> Iterator[Lease]:
        wanted.append(waits)
        entered.set()
        watch.until(lambda: not waits())
        yield Lease(job)

    monkeypatch.setattr(supervisor, "hold", hold)
    run = module.Run(make_job(num_processes=2), Scheduler()).start()
    assert entered.wait(watch.DEADLINE)
    run.stop()
    assert wanted[0]()
    run.cancel()
    assert not wanted[0]()
    assert run.wait(watch.DEADLINE)


@pytest.mark.parametrize(
    ("waits", "wants", "holds"),
    [
        (StatusDetail("waiting for 2 task slots", ": 1 is free"), True, False),
        (StatusDetail("waiting for executors", yields=True), False, False),
        (None, False, True),  # its tasks run, and have not reached the driver
    ],
)
def test_a_run_wants_slots_while_it_waits_for_those_of_its_scheduler(
    waits: StatusDetail | None, wants: bool, holds: bool
) -> None:
    scheduler = Scheduler()
    scheduler.waits = waits
    with running(scheduler, patience=0.0, ask=0.0) as run:
        watch.until(lambda: scheduler.at is not None)
        assert run._wants_slots(on_driver=False) is wants
        assert not run._wants_slots(on_driver=True)
        assert run._holds_slots is holds
    assert not run._wants_slots(on_driver=False)


def test_a_run_whose_nodes_do_not_reach_the_driver_wants_no_slots() -> None:
    """On Spark Connect, which does not say whether a run waits for slots, once tasks have had time to come."""
    scheduler = Scheduler()
    scheduler.reports_slots, scheduler.waits = False, None
    with running(scheduler, patience=0.0, ask=0.0, look=0.01, unreached=0.05) as run:
        watch.until(lambda: scheduler.at is not None)
        assert run._wants_slots(on_driver=False) or run._supervisor.state.unreached
        watch.until(lambda: run._supervisor.state.unreached)
        assert not run._wants_slots(on_driver=False)
