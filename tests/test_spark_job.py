"""What Spark shows of a run, its job's status and reason, and what a run takes from Spark's network settings."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trainings
import watch
from jobs import changed, make_job
from sessions import Sessions

from distributor import (
    ConfigurationError,
    NodeLostError,
    RunCancelledError,
    StallError,
    Status,
    TorchDistributor,
    TrainingError,
)
from distributor.channel import requests
from distributor.channel.failed_reports import FailedReports
from distributor.channel.server import ChannelServer, Endpoint
from distributor.run.handle import Run
from distributor.schedulers.spark.classic import ClassicSession
from distributor.schedulers.spark.scheduler import SparkScheduler
from distributor.values.messages import FailedReport

pytestmark = pytest.mark.spark

LOCAL = "local[4]"
CLUSTER = "local-cluster[2,2,1024]"
ONE_TASK_EACH = "local-cluster[2,1,1024]"


def on_executors(num_processes: int = 2, **options: Any) -> TorchDistributor:
    return TorchDistributor(num_processes, False, False, **options)


def spark_job(session: Any, run: Run) -> tuple[str, str, int]:
    """Status of a run's job once Spark says that it has ended, the reason of a failure, and attempts of its stage."""
    scala = session.sparkContext._jsc.sc()

    def look() -> tuple[str, str, int] | None:
        (number,) = scala.statusTracker().getJobIdsForTag(f"distributor-{run.id}")
        info = session.sparkContext.statusTracker().getJobInfo(number)
        stage = scala.statusStore().lastStageAttempt(info.stageIds[0])
        if info.status == "RUNNING":
            return None
        reason = stage.failureReason()
        return info.status, reason.get() if reason.isDefined() else "", stage.attemptId() + 1

    return watch.until(look)


def assert_failed(session: Any, run: Run, reason: str) -> None:
    status, shown, attempts = spark_job(session, run)
    assert (status, attempts) == ("FAILED", 1)
    if not session.version.startswith("3."):  # Spark 3.5 takes no reason
        assert f"cancelled by distributor: {reason}" in shown


def executors(session: Any) -> set[tuple[str, int]]:
    infos = session.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    return {(info.host(), info.port()) for info in infos}


@pytest.fixture(scope="module", params=[LOCAL, CLUSTER, pytest.param(ONE_TASK_EACH, marks=pytest.mark.long)])
def master(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def session(master: str, sessions: Sessions) -> Any:
    return sessions.get(master)


@pytest.fixture
def ranks(master: str) -> int:
    """As many as there are slots."""
    return 2 if master == ONE_TASK_EACH else 4


def test_sparks_pages_name_the_users_call(session: Any) -> None:
    run = on_executors().submit(trainings.rank)
    assert run.results(timeout=watch.DEADLINE) == [0, 1]
    scala = session.sparkContext._jsc.sc()
    (number,) = scala.statusTracker().getJobIdsForTag(f"distributor-{run.id}")
    job = watch.until(lambda: scala.statusStore().job(number))
    stage = scala.statusStore().lastStageAttempt(job.stageIds().last())
    line = inspect.getsourcelines(test_sparks_pages_name_the_users_call)[1] + 1
    assert (job.name(), stage.name()) == (f"submit at test_spark_job.py:{line}",) * 2
    session.sparkContext.parallelize([1], 1).count()
    assert scala.getLocalProperty("callSite.short") is None


@pytest.mark.parametrize("how", ["diverge", pytest.param("SIGKILL", marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_failed_run_is_a_failed_job(session: Any, ranks: int, how: str) -> None:
    assert on_executors(ranks).submit(trainings.all_reduce).results(timeout=watch.DEADLINE)  # all executors are there
    before = executors(session)
    run = on_executors(ranks).submit(trainings.fail_on_rank_1, how)
    with pytest.raises(TrainingError, match="^rank 1 on .* failed: ") as caught:
        run.result(timeout=watch.DEADLINE)
    watch.gone(run.id)
    if how == "diverge":
        assert isinstance(caught.value.__cause__, trainings.Diverged)
        assert caught.value.__cause__.step == 17
    assert {failure.rank for failure in caught.value.failures} <= set(range(ranks))
    assert_failed(session, run, str(caught.value).splitlines()[0])
    # The slots are free again, and nothing was lost with the job.
    after = on_executors(ranks).submit(trainings.all_reduce)
    assert len(after.results(timeout=watch.DEADLINE)) == ranks
    assert spark_job(session, after) == ("SUCCEEDED", "", 1)
    assert executors(session) == before
    watch.gone(after.id)


def test_two_of_more_slots(two_executors: Any) -> None:
    run = on_executors(2).submit(trainings.fail_on_rank_1, "raise")
    with pytest.raises(TrainingError) as caught:
        run.result(2 * watch.DEADLINE)
    assert isinstance(caught.value.__cause__, ValueError)
    assert_failed(two_executors, run, "rank 1 on ")


def test_a_stall_is_told_as_one(two_executors: Any) -> None:
    run = on_executors(4, stall_timeout=1, grace_period=1).submit(lambda: time.sleep(600))
    with pytest.raises(StallError):
        run.result(2 * watch.DEADLINE)
    assert_failed(
        two_executors, run, "the ranks were stopped: no rank wrote anything or used CPU time for stall_timeout=1 s"
    )


def fail_everywhere() -> None:
    raise trainings.Diverged(trainings.rank())


def test_ranks_that_all_fail_are_all_told(session: Any, ranks: int) -> None:
    run = on_executors(ranks).submit(fail_everywhere)
    with pytest.raises(TrainingError, match=r"failed: trainings\.Diverged: ") as caught:
        run.result(2 * watch.DEADLINE)
    assert isinstance(caught.value.__cause__, trainings.Diverged)
    assert caught.value.__cause__.step == caught.value.rank
    assert_failed(session, run, f"rank {caught.value.rank} on ")


def fail_while_others_save(failing: int) -> None:
    """The others need some of their grace, so that their nodes end later; all are up before one fails."""
    import torch.distributed as dist

    def save(*_: Any) -> None:
        time.sleep(1.5)
        print("saved", flush=True)
        os._exit(0)

    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, save)
    dist.barrier()
    if trainings.rank() == failing:
        raise ValueError("too early")
    time.sleep(60)


@pytest.mark.parametrize("failing", [0, 1])
def test_nodes_that_end_at_different_times(
    session: Any, ranks: int, failing: int, capfd: pytest.CaptureFixture[str]
) -> None:
    run = on_executors(ranks).submit(fail_while_others_save, failing)
    with pytest.raises(TrainingError, match=f"^rank {failing} on .* failed: ValueError: too early") as caught:
        run.result(2 * watch.DEADLINE)
    assert isinstance(caught.value.__cause__, ValueError)
    assert capfd.readouterr().out.count("saved") == ranks - 1
    assert_failed(session, run, f"rank {failing} on ")


def test_a_cancelled_run_is_no_success(session: Any, ranks: int, tmp_path: Path) -> None:
    run = on_executors(ranks, grace_period=1).submit(trainings.wait_for, str(tmp_path / "never"))
    watch.until(lambda: run.status is Status.RUNNING)
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(timeout=watch.DEADLINE)
    assert_failed(session, run, "the ranks were stopped")
    watch.gone(run.id)


def test_an_agent_that_is_killed(session: Any, ranks: int, tmp_path: Path) -> None:
    run = on_executors(ranks, grace_period=1).submit(trainings.wait_for, str(tmp_path / "never"))
    watch.until(lambda: run.status is Status.RUNNING)
    before = executors(session)
    next(process for process in watch.processes(run.id) if watch.is_agent(process)).kill()
    with pytest.raises(NodeLostError, match="lost the node on"):
        run.result(timeout=watch.DEADLINE)
    watch.gone(run.id)
    assert_failed(session, run, "lost the node on ")
    assert executors(session) == before


def test_a_job_that_nobody_cancels_ends_by_itself(session: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClassicSession, "_fail_job", lambda *_: None)
    run = on_executors(ranks, grace_period=1).submit(trainings.fail_on_rank_1, "raise")
    with pytest.raises(TrainingError, match="^rank 1 on .* failed: ValueError") as caught:
        run.result(timeout=watch.DEADLINE)
    assert isinstance(caught.value.__cause__, ValueError)
    assert len({failure.rank for failure in caught.value.failures}) == len(caught.value.failures)
    assert spark_job(session, run)[0] == "SUCCEEDED"


def talk_and_fail() -> None:
    import torch.distributed as dist

    print("rank", trainings.rank(), flush=True)
    dist.init_process_group("gloo")
    dist.barrier()
    if trainings.rank() == 1:
        raise ValueError("after talking")
    time.sleep(60)


@pytest.mark.long_on_executors
@pytest.mark.slow
def test_a_failed_run_without_the_channel(
    session: Any, ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the channel did not bring comes through Spark."""
    listen = ChannelServer.listen
    monkeypatch.setattr(ChannelServer, "listen", lambda self, *args: replace(listen(self, *args), port=1))
    run = on_executors(ranks, log_dir=tmp_path).submit(talk_and_fail)
    with pytest.raises(TrainingError, match="^rank 1 on .* failed: ValueError: after talking") as caught:
        run.result(2 * watch.DEADLINE)
    assert isinstance(caught.value.__cause__, ValueError)
    assert spark_job(session, run)[0] == "SUCCEEDED"  # a failed job would bring no reports
    for rank in range(ranks):
        assert (tmp_path / run.id / f"rank-{rank}.stdout").read_text() == f"rank {rank}\n"
    assert len(on_executors(ranks).submit(trainings.all_reduce).results(2 * watch.DEADLINE)) == ranks


@pytest.mark.parametrize("lost", ["none", "all", "the last"])
def test_reports_that_the_channel_loses_come_through_spark(
    session: Any, ranks: int, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is the same, whichever way its report takes."""
    receive, arrived = FailedReports.receive, 0

    async def cut(
        self: FailedReports, told: FailedReport, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal arrived
        arrived += 1
        if lost == "all" or (lost == "the last" and arrived == told.nodes):
            reader = asyncio.StreamReader()
            reader.feed_data(b"R")
            reader.feed_eof()
        await receive(self, told, reader, writer)

    monkeypatch.setattr(FailedReports, "receive", cut)
    monkeypatch.setattr(requests, "CONNECT_TIMEOUT", watch.DEADLINE)  # else Spark brings all, on a machine that is busy
    run = on_executors(ranks).submit(fail_everywhere)
    with pytest.raises(TrainingError, match=r"failed: trainings\.Diverged: ") as caught:
        run.result(watch.DEADLINE)
    assert arrived
    assert isinstance(caught.value.__cause__, trainings.Diverged)
    assert caught.value.__cause__.step == caught.value.rank
    assert {caught.value.rank} <= {failure.rank for failure in caught.value.failures} <= set(range(ranks))
    assert spark_job(session, run)[0] == ("FAILED" if lost == "none" else "SUCCEEDED")
    watch.gone(run.id)


def test_a_run_of_one_task(session: Any) -> None:
    run = on_executors(1).submit(fail_everywhere)
    with pytest.raises(TrainingError) as caught:
        run.result(timeout=watch.DEADLINE)
    assert isinstance(caught.value.__cause__, trainings.Diverged)
    assert_failed(session, run, "rank 0 on ")


@pytest.mark.long
def test_the_drivers_log_stays_short(tmp_path: Path) -> None:
    """In a driver of its own, for its stderr at Spark's default level."""
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from pyspark.sql import SparkSession
        from distributor import TorchDistributor, TrainingError

        spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

        def train():
            raise ValueError("no")

        print("FROM HERE", file=sys.stderr, flush=True)
        try:
            TorchDistributor(2, False, False).run(train)
        except TrainingError as error:
            print("caught", error.rank)
        spark.range(0, 2, 1, 2).count()  # takes both slots, so the run's tasks have ended
        spark.stop()
        """)
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert "caught" in ended.stdout, ended.stderr[-2000:]
    log = [line for line in ended.stderr.partition("FROM HERE")[2].splitlines() if re.search(" (WARN|ERROR) ", line)]
    assert 0 < len(log) <= 2, log  # the one that waits to be killed, and a sibling that has not quite ended
    assert all("Lost task" in line and "TaskKilled" in line for line in log), log
    assert "\tat " not in ended.stderr


# Spark's settings for its network


ENCRYPTED = {
    "spark.authenticate": "true",
    "spark.authenticate.secret": "s3cret",
    "spark.network.crypto.enabled": "true",
}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["spark.ssl.enabled"], "spark.ssl.enabled is true"),
        (["spark.network.crypto.enabled", "spark.authenticate"], "spark.network.crypto.enabled is true"),
        (
            ["spark.network.crypto.enabled", "spark.authenticate", "spark.authenticate.enableSaslEncryption"],
            "spark.network.crypto.enabled and spark.authenticate.enableSaslEncryption are true",
        ),
    ],
)
@pytest.mark.long
def test_encryption_that_ranks_do_not_have_is_refused(sessions: Sessions, settings: list[str], text: str) -> None:
    sessions.get("local[2]", **dict.fromkeys(settings, "true"), **{"spark.authenticate.secret": "s3cret"})
    with pytest.raises(RuntimeError, match=rf"^{text}, but .*NOT encrypted: NCCL's and gloo's .*gradients") as e:
        on_executors(2).run(trainings.rank)
    assert isinstance(e.value, ConfigurationError)
    assert "set pytorch.spark.distributor.ignoreSsl to true" in str(e.value)


@pytest.mark.long
def test_encryption_may_be_asked_for_while_the_session_runs(sessions: Sessions) -> None:
    session = sessions.get("local[2]")
    session.conf.set("spark.ssl.enabled", "true")
    try:
        with pytest.raises(ConfigurationError, match=r"^spark.ssl.enabled is true, but .*NOT encrypted"):
            on_executors(2).run(trainings.rank)
    finally:
        session.conf.unset("spark.ssl.enabled")


@pytest.mark.long
def test_authentication_alone_is_told_once(sessions: Sessions, caplog: pytest.LogCaptureFixture) -> None:
    sessions.get("local[2]", **{"spark.authenticate": "true", "spark.authenticate.secret": "s3cret"})
    with caplog.at_level(logging.WARNING, "distributor"):
        assert on_executors(2).run(trainings.all_reduce) == 3.0
        assert on_executors(2).run(trainings.all_reduce) == 3.0
    assert caplog.text.count("spark.authenticate is true") == 1
    assert "NOT authenticated: NCCL's and gloo's" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("where", ["session", "context"])
def test_ignore_ssl_accepts_unencrypted_traffic(
    sessions: Sessions, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    key = "pytorch.spark.distributor.ignoreSsl"
    settings = ENCRYPTED
    session = sessions.get("local[2]", **settings, **({key: "true"} if where == "context" else {}))
    if where == "session":
        session.conf.set(key, "true")
    with caplog.at_level(logging.WARNING, "distributor"):
        assert on_executors(2).run(trainings.all_reduce) == 3.0
    assert caplog.text.count("spark.network.crypto.enabled is true") == 1
    assert "gradients" in caplog.text


@pytest.mark.slow
def test_deepspeed_has_a_key_of_its_own(sessions: Sessions) -> None:
    from distributor.launch import DeepSpeed
    from distributor.values.job import Script

    job = make_job("run", 2, Script("train.py", b""), False, launch=DeepSpeed())
    settings = ENCRYPTED
    session = sessions.get("local[2]", **settings, **{"pytorch.spark.distributor.ignoreSsl": "true"})
    with pytest.raises(ConfigurationError, match=r"set deepspeed\.spark\.distributor\.ignoreSsl"):
        SparkScheduler(session).check(job)
    session.conf.set("deepspeed.spark.distributor.ignoreSsl", "true")
    SparkScheduler(session).check(job)


def listening_on(monkeypatch: pytest.MonkeyPatch, ports: tuple[int, int]) -> list[Endpoint]:
    """Has runs use a range of ports; where they come to listen."""

    class Ranged(SparkScheduler):
        def run(self, job: Any, server: ChannelServer) -> Any:
            return super().run(changed(job, driver_ports=ports), server)

    monkeypatch.setattr("distributor.schedulers.spark.scheduler.SparkScheduler", Ranged)
    return watch.endpoints(monkeypatch)


def test_the_channel_keeps_to_the_ports_it_is_given(
    one_jvm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, bind = SparkScheduler(one_jvm)._barrier.driver_address()
    with socket.create_server((bind, 0)) as busy:
        port = busy.getsockname()[1]
        used = listening_on(monkeypatch, (port, port + 5))
        assert on_executors(2).run(trainings.all_reduce) == 3.0
        assert port < used[0].port <= port + 5
        listening_on(monkeypatch, (port, port))
        assert on_executors(2).run(trainings.all_reduce) == 3.0
    assert f"cannot listen on {bind}, ports {port}-{port} (" in caplog.text
