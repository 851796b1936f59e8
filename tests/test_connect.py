"""Spark Connect: the same runs, the same errors. Run by themselves (``-m connect``): one kind of session a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import checkpointed
import deepspeed_trainings
import pytest
import trainings
import victims
import watch
from at_once import at_once
from captured import assert_own_copies
from sessions import path_without_torch, two_gpus

from distributor import (
    ConfigurationError,
    Data,
    DeepspeedTorchDistributor,
    PayloadError,
    ResourceError,
    RunCancelledError,
    Status,
    TorchDistributor,
    TrainingError,
    predict,
    runtime,
    snapshot,
    sweep,
)
from distributor.schedulers.spark import connect as spark_connect, scheduler as spark_scheduler

pytestmark = pytest.mark.connect

#: A Python with PySpark 4, which starts the server. PySpark 3.5's package has none.
SERVER = os.environ.get("CONNECT_SERVER")


@pytest.fixture(scope="module", autouse=True)
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if shutil.which("java") is None:
        pytest.skip("no Java here")
    pytest.importorskip("grpc")
    pytest.importorskip("pyspark", None if SERVER else "4", "PySpark 3.5's package has no server: set CONNECT_SERVER")
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYSPARK_PYTHON", raising=False)
        patch.setenv("PATH", path_without_torch(tmp_path_factory.mktemp("bin")))
        with nullcontext("local[4]") if SERVER is None else serving(os.path.abspath(SERVER)) as remote:
            started = SparkSession.builder.remote(remote).getOrCreate()
            yield started
            started.stop()


@contextmanager
def serving(python: str, master: str = "local[4]", **settings: str) -> Iterator[str]:
    """The URL of a server that a Python starts, which also runs the tasks."""
    command = [python, str(Path(__file__).parent / "support" / "connect_server.py"), master, json.dumps(settings)]
    clients = ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED")  # set where a server was started
    env = {name: value for name, value in os.environ.items() if name not in clients} | {"PYSPARK_PYTHON": python}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        yield f"sc://localhost:{int(process.stdout.readline())}"


def on_executors(num_processes: int | tuple[int, int] = 2, **options: Any) -> TorchDistributor:
    return TorchDistributor(num_processes, use_gpu=False, **options)


def test_every_rank_takes_part_in_a_collective() -> None:
    run = on_executors(3).submit(trainings.all_reduce)
    assert run.results() == [6.0] * 3
    assert run.placement is not None
    assert not run.placement.nodes[0].executor.startswith("127.0.0.1:0")


@pytest.mark.skipif(SERVER is not None, reason="another process has started it")
def test_a_server_that_this_process_started_runs_the_drivers_python() -> None:
    assert on_executors(1).run(lambda: sys.executable) == sys.executable


def test_first_runs_at_the_same_moment_each_return_their_own_value() -> None:
    """The session is found from any thread."""
    spark_scheduler._portable_task.cache_clear()
    spark_connect._uploaded.clear()
    runs = [
        partial(on_executors(1, local_mode=False).run, lambda value, _: value, number, bytes(2 << 20))
        for number in range(4)
    ]
    assert at_once(*runs) == [0, 1, 2, 3]


def test_what_ranks_write_into_large_arguments_is_their_own() -> None:
    assert_own_copies(on_executors)


@pytest.mark.parametrize("of", [lambda df: df, lambda df: [df.sparkSession], lambda df: {"by": df.groupBy("id")}])
def test_sessions_and_dataframes_are_refused_before_anything_starts(session: Any, of: Callable[[Any], Any]) -> None:
    with pytest.raises(PayloadError, match=r"argument 1 is a .* lives on the driver only\. .*\(df\.write\.parquet\)"):
        on_executors(1).run(len, of(session.range(3)))


def test_a_python_worker_that_spark_would_kill_is_not_started(session: Any) -> None:
    """The settings may be the session's own, beside those of the server."""
    names = [f"spark.sql.execution.pyspark.udf.{name}" for name in ("killOnIdleTimeout", "idleTimeoutSeconds")]
    for name, value in zip(names, ("true", "5"), strict=True):
        session.conf.set(name, value)
    try:
        if session.version < "4.1":
            assert on_executors(1).run(trainings.rank) == 0
            return
        with pytest.raises(ConfigurationError, match=rf"^{names[0]} is true and {names[1]} is 5: .* Set {names[0]} to"):
            on_executors(1).run(trainings.rank)
    finally:
        for name in names:
            session.conf.unset(name)


@pytest.mark.parametrize("fails", [False, True])
def test_reports_come_at_the_end_on_connect(fails: bool) -> None:
    run = on_executors(2).submit(report_twice, fails)
    assert run.wait(watch.DEADLINE)
    assert (run.status is Status.FAILED) == fails
    assert [(row.step, row.values["loss"]) for row in run.metrics if row.rank == 1] == [(1, 0.5), (2, 0.25)]
    assert run.latest_metrics == {"loss": 0.25}


@pytest.mark.slow
def test_checkpoints_of_executors_on_connect(tmp_path: Path) -> None:
    """Ranks need each other and the place only. Callbacks hear of checkpoints at the end."""
    callback = checkpointed.Told()
    run = on_executors(2, checkpoints=tmp_path, callbacks=[callback]).submit(checkpointed.save_steps, 2)
    assert run.results() == [None, None]
    assert [step for step, _ in callback.checkpoints] == [1, 2]
    assert on_executors(2, checkpoints=tmp_path).submit(checkpointed.load_value).results() == [2, 2]


def test_killed_ranks_start_again(tmp_path: Path) -> None:
    run = on_executors(2, checkpoints=tmp_path, max_restarts=1).submit(save_then_die)
    assert run.results(watch.DEADLINE) == [2, 2]
    assert [attempt.number for attempt in run.attempts] == [0, 1]


@pytest.mark.slow
def test_a_run_that_has_lost_a_node_goes_on_in_a_new_job(tmp_path: Path) -> None:
    run = on_executors(2, checkpoints=tmp_path / "kept", max_restarts=1).submit(save_then_wait, str(tmp_path / "saved"))
    watch.until((tmp_path / "saved").exists)
    victims.part(run, "agent").kill()
    assert run.results(watch.DEADLINE) == [2, 2]
    assert [attempt.number for attempt in run.attempts] == [0, 1]
    watch.gone(run.id)


def test_a_run_that_is_asked_to_stop_succeeds() -> None:
    run = on_executors(2).submit(count_until_stopped)
    watch.until(lambda: run.progress is not None)
    run.stop()
    (step,) = {*run.results(watch.DEADLINE)}
    assert step is not None


def test_a_range_takes_what_the_settings_give() -> None:
    run = on_executors((1, 8)).submit(trainings.all_reduce)
    assert len(run.results(watch.DEADLINE)) == 4


def count_until_stopped() -> int | None:
    from distributor import runtime

    for step in range(1_000_000):
        runtime.report(step=step)
        if runtime.should_stop(step):
            return step
        time.sleep(0.01)
    return None


def save_then_wait(saved: str) -> int:
    """What the second attempt finds of the first, which stays until it is ended."""
    from distributor import runtime

    if runtime.attempt() == 0:
        runtime.save_checkpoint({"value": 2}, 2, wait=True)
        Path(saved).touch()
        time.sleep(600)
    return checkpointed.load_value()


def save_then_die() -> int:
    """Rank 1 is killed after it has saved; what the second attempt finds."""
    import os
    import signal

    from distributor import runtime

    if runtime.attempt() == 0:
        runtime.save_checkpoint({"value": 2}, 2, wait=True)
        if runtime.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return checkpointed.load_value()


def report_twice(fails: bool) -> None:
    import torch.distributed as dist

    from distributor import runtime

    dist.init_process_group("gloo")
    for step in (1, 2):
        runtime.report(step=step, loss=0.5**step)
    dist.barrier()  # the first rank that fails ends the others
    if fails:
        raise ValueError("boom")


@pytest.mark.slow
def test_files_come_back_and_are_there_again(tmp_path: Path) -> None:
    """Through Spark where the client cannot be reached, here over the channel."""

    def train() -> list[str]:
        import os
        from pathlib import Path

        names = sorted(path.name for path in Path().glob("*.pt"))
        Path(f"{len(names)}-{os.environ['RANK']}.pt").write_bytes(bytes(1 << 20))
        return names

    distributor = on_executors(1, output_dir=tmp_path / "out")
    assert distributor.run(train) == []
    assert distributor.run(train) == ["0-0.pt"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0-0.pt", "1-0.pt"]


def test_lines_of_ranks_arrive_on_connect(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('hello from', sys.argv[1])\n")
    on_executors(2).run(script, "a script")
    assert capfd.readouterr().out.count("hello from a script") == 2


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "ValueError: learning rate must be positive"),
        ("exit", "exited with code 3"),
        ("SIGKILL", "killed by SIGKILL"),
    ],
)
def test_a_failing_rank_ends_the_run_at_once(how: str, text: str) -> None:
    run = on_executors(2).submit(trainings.fail_on_rank_1, how)
    with pytest.raises(TrainingError) as caught:
        run.result(watch.DEADLINE)
    assert str(caught.value).startswith(f"rank 1 on {caught.value.host} failed: {text}")
    assert "java" not in str(caught.value).lower()
    if how == "raise":
        assert isinstance(caught.value.__cause__, ValueError)
    watch.gone(run.id)


def test_values_of_many_messages_come_back() -> None:
    value = on_executors(1).run(lambda: bytes(range(256)) * (40 << 12))
    assert value == bytes(range(256)) * (40 << 12)


def test_a_run_on_connect_can_be_cancelled(tmp_path: Path) -> None:
    run = on_executors(2, grace_period=1).submit(trainings.wait_for, str(tmp_path / "never"))
    watch.until(lambda: run.status is Status.RUNNING)
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result(timeout=watch.DEADLINE)
    watch.gone(run.id)


def test_more_slots_than_there_can_be() -> None:
    with pytest.raises(ResourceError, match=r"needs 5 task slots at once"):
        on_executors(5).run(trainings.rank)


@pytest.mark.long
def test_deepspeed_trains_on_connect() -> None:
    pytest.importorskip("deepspeed")
    run = DeepspeedTorchDistributor(2, useGpu=False, deepspeedConfig=deepspeed_trainings.config(3)).submit(
        deepspeed_trainings.with_the_runs_config, 10
    )
    first, second = run.results(timeout=3 * watch.DEADLINE)
    assert first["losses"] == second["losses"]
    assert (first["stage"], first["config"]) == (3, run.deepspeed_config)


def test_a_frame_reaches_the_ranks(session: Any, tmp_path: Path) -> None:
    def rows() -> list[int]:
        return [row for batch in runtime.dataset("train").loader(batch_size=24) for row in batch["id"].tolist()]

    data = snapshot(Data(session.range(48), lanes=2), tmp_path / "numbers")
    run = on_executors(2, data={"train": data}).submit(rows)
    assert sorted(row for found in run.results() for row in found) == list(range(48))
    made = (tmp_path / "numbers" / "snapshot.json").stat().st_mtime_ns
    assert snapshot(Data(session.range(48), lanes=2), tmp_path / "numbers").source == data.source
    assert (tmp_path / "numbers" / "snapshot.json").stat().st_mtime_ns == made
    with pytest.raises(
        ConfigurationError, match=r"data 'train' needs a folder or URL that the driver and all executors see"
    ):
        on_executors(2, data={"train": session.range(48)}).run(rows)


@pytest.mark.slow
def test_a_frame_is_scored(session: Any) -> None:
    def load() -> Any:
        return lambda batch: {"double": 2 * batch["x"][:, 0], "said": [f"n{i}" for i in batch["x"][:, 0].tolist()]}

    scored = predict(load, session.range(100), input={"x": "id"}, output="double bigint, said string", keep_warm=1.0)
    assert sorted(map(tuple, scored.collect())) == [(i, 2 * i, f"n{i}") for i in range(100)]
    with pytest.raises(Exception, match="the model cannot be loaded: ValueError: no weights"):
        predict(no_weights, session.range(1), input={"x": "id"}, output="y float").collect()


def no_weights() -> None:
    raise ValueError("no weights")


@contextmanager
def another_session(master: str, **settings: str) -> Iterator[Any]:
    """A session of a server of its own, beside the active one."""
    from pyspark.sql.connect.session import SparkSession

    with serving(os.path.abspath(SERVER or sys.executable), master, **settings) as remote:
        other = SparkSession.builder.remote(remote).create()
        try:
            yield other
        finally:
            other.client.close()  # its stop() would stop the server that this process has started


def visible() -> Any:
    def score(batch: dict[str, Any]) -> Any:
        time.sleep(0.01)
        return [f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}"] * len(batch["x"])

    return score


def scored_on_gpus(session: Any, num_gpus: int = 1) -> list[str]:
    """The GPUs and the pid of each process that has computed rows."""
    frame = session.range(3_000, numPartitions=4)
    scored = predict(visible, frame, input={"x": "id"}, output="place string", num_gpus=num_gpus, keep_warm=60.0)
    (rows,) = at_once(scored.collect)  # in a thread without an active session
    assert sorted(row.id for row in rows) == list(range(3_000))
    return sorted({row.place for row in rows})


@pytest.mark.long
@pytest.mark.parametrize("amount", [None, "0.5"], ids=["profile", "settings"])
def test_models_on_gpus_of_executors_are_fed_on_connect(tmp_path: Path, amount: str | None) -> None:
    """Spark hands out the GPUs that a script names, on which nobody computes."""
    from pyspark import __version__

    settings = two_gpus(tmp_path / "gpus.sh", """echo '{"name": "gpu", "addresses": ["0", "1"]}'""")
    settings |= {} if amount is None else {"spark.task.resource.gpu.amount": amount}
    with another_session("local-cluster[1,4,1024]", **settings) as other:
        if amount is None and __version__ < "4":
            with pytest.raises(ConfigurationError, match=r"before Spark 4\.0 \(this is 3\.5\.\d\): start a session"):
                scored_on_gpus(other)
            return
        first = scored_on_gpus(other)
        assert [each.split()[0] for each in first] == ["0", "1"]
        assert scored_on_gpus(other) == first, "the models stay"
        with pytest.raises(ConfigurationError, match=r"num_gpus=3\): the settings give .*: start a session"):
            scored_on_gpus(other, 3)


@pytest.mark.long
def test_models_take_turns_with_the_gpus_of_a_server_without_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with another_session("local[4]") as other:
        assert [each.split()[0] for each in scored_on_gpus(other)] == ["4", "6"]
        assert [each.split()[0] for each in scored_on_gpus(other, 2)] == ["4,6"]


@pytest.mark.long
def test_gpus_of_a_server_that_connect_does_not_name_are_refused(tmp_path: Path) -> None:
    script = two_gpus(tmp_path / "gpus.sh", """echo '{"name": "gpu", "addresses": ["0"]}'""")
    drivers = {"spark.driver.resource.gpu.amount": "1"}
    drivers["spark.driver.resource.gpu.discoveryScript"] = script["spark.executor.resource.gpu.discoveryScript"]
    with another_session("local[4]", **drivers) as other:
        words = r"gpu.amount=1\), and Spark Connect does not say which these are: start it without that setting"
        with pytest.raises(ConfigurationError, match=words):
            scored_on_gpus(other)


def test_runs_keep_the_tags_of_the_thread_that_submits_them(session: Any, tmp_path: Path) -> None:
    """Two of several runs from threads are ended by their tag; the others have values of their own."""
    runs: dict[int, Any] = {}

    def submit(number: int) -> None:
        session.addTag("even" if number % 2 == 0 else "odd")
        distributor = on_executors(1, grace_period=1)
        runs[number] = distributor.submit(trainings.wait_for, str(tmp_path / f"{'never' if number % 2 == 0 else 'go'}"))

    at_once(*(partial(submit, number) for number in range(4)))
    watch.until(lambda: all(run.status is Status.RUNNING for run in runs.values()))
    session.interruptTag("even")
    (tmp_path / "go").touch()
    for number, run in runs.items():
        if number % 2:
            run.result(timeout=watch.DEADLINE)
        else:
            with pytest.raises(RunCancelledError):
                run.result(timeout=watch.DEADLINE)
    assert not session.getTags()


def report_number(number: int) -> None:
    runtime.report(loss=number)


@pytest.mark.slow
def test_a_search_on_connect_runs_as_many_trials_as_the_settings_provide_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    options: Any = {"metric": ("loss", "min"), "trials": 4}
    space = {"number": [0, 1, 2, 3]}
    study = sweep(on_executors(2), report_number, space, **options)
    assert [trial.outcome for trial in study.table] == ["complete"] * 4
    monkeypatch.setattr(spark_connect.ConnectSession, "room", lambda self, job: None)
    with pytest.raises(ConfigurationError, match="does not say how many slots there are: pass at_once="):
        sweep(on_executors(2), report_number, space, **options)
    assert len(sweep(on_executors(2), report_number, space, at_once=2, **options).table) == 4
