"""What only Spark can show: slots, GPUs of tasks, executors without the package, Spark's own limits and kill links."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import trainings
import watch
from at_once import at_once
from jobs import make_job
from proxy import Proxy
from sessions import Sessions, two_gpus

from distributor import (
    ConfigurationError,
    NodeLostError,
    PayloadError,
    ResourceError,
    ResultError,
    Run,
    RunCancelledError,
    StartError,
    Status,
    TorchDistributor,
    TrainingError,
)
from distributor.schedulers.spark import scheduler as spark_scheduler
from distributor.schedulers.spark.sessions import context_for_tasks
from distributor.schedulers.spark.slots import Slots, cluster_of
from distributor.shipping import package
from distributor.values.environment import CHECK_GPUS

pytestmark = pytest.mark.spark

CLUSTER = "local-cluster[2,2,1024]"


def on_executors(num_processes: int = 2, use_gpu: bool = False, **options: Any) -> TorchDistributor:
    return TorchDistributor(num_processes, False, use_gpu, **options)


@pytest.mark.slow
def test_local_mode_is_decided_by_the_master(one_jvm: Any) -> None:
    assert is_child_of_driver(TorchDistributor(1, use_gpu=False))
    assert not is_child_of_driver(TorchDistributor(1, local_mode=False, use_gpu=False))


def is_child_of_driver(distributor: TorchDistributor) -> bool:
    """Whether the agent of a run was asked for by this process rather than by a Spark worker."""
    return distributor.run(lambda: int(psutil.Process().parents()[1].cmdline()[5])) == os.getpid()


def test_first_runs_at_the_same_moment_each_return_their_own_value(spark: Any) -> None:
    spark_scheduler._portable_task.cache_clear()
    package.package_zip.cache_clear()
    runs = [partial(on_executors(1).run, lambda value: value, number) for number in range(4)]
    assert at_once(*runs) == [0, 1, 2, 3]


def plus_one(x: int) -> int:
    return x + 1


def test_functions_keep_their_file_and_source(one_jvm: Any) -> None:
    """With each cloudpickle: 3.1.3, which names no files, is in the environment of PySpark 4.0."""

    def train() -> tuple[list[str], int]:
        import inspect

        import torch

        def square(x: int) -> int:
            return x * x

        compiled: Any = torch.jit.script(plus_one)
        return [inspect.getsource(square).strip(), *(lambda: [square.__code__.co_filename])()], compiled(2)

    (source, file), result = on_executors(1).run(train)
    assert (source.splitlines()[0], file, result) == ("def square(x: int) -> int:", __file__, 3)
    with pytest.raises(TrainingError, match=rf'File "{__file__}", line \d+, in <lambda>\n .*1 / 0'):
        on_executors(1).run(lambda: 1 / 0)


def test_no_session_is_an_error(tmp_path: Path) -> None:
    code = """
        import sys
        from distributor import ConfigurationError, TorchDistributor
        try:
            TorchDistributor(1, False, False).run(print)
        except ConfigurationError as error:
            sys.exit(str(error))
    """
    assert "there is no active Spark session: create one first" in programs.run(tmp_path, code).stderr


def of_closure(value: Any) -> Any:
    return lambda: value


def of_helper(value: Any) -> Any:
    def helper() -> Any:
        return value

    return lambda: helper()


def of_class(value: Any) -> Any:
    class Trainer:
        held = value

        def __call__(self) -> None: ...

    return Trainer()


class Holder:
    """An object of the user's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def train(self) -> None: ...


def take(*args: Any, **kwargs: Any) -> None: ...


#: Ways by which an object gets into a function, and what the error says of each.
ROUTES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "closure": (of_closure, "the variable 'value' that it uses is a {kind}"),
    "helper": (of_helper, "in .*helper, the variable 'value' that it uses is a {kind}"),
    "class": (of_class, "a {kind} that it uses"),
    "method": (lambda value: Holder(value).train, "the Holder object it is bound to is a .*Holder"),
    "default": (lambda value: eval("lambda value=value: value", {"value": value}), "the default of its argument 'va"),
    "global": (lambda value: eval("lambda: value", {"value": value}), "the global 'value' that it uses is a {kind}"),
    "partial": (lambda value: partial(take, value), "argument 1 of the partial is a {kind}"),
    "argument": (lambda value: (take, value), "argument 1 is a {kind}"),
    "list": (lambda value: (take, [{"a": value}]), "argument 1 is a builtins.list"),
    "attribute": (lambda value: (take, 1, Holder(Holder(value))), "argument 2 is a .*Holder"),
}


#: Objects of Spark: how they are made, their class, and what the error says of them.
OBJECTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "accumulator": (lambda spark: spark.accumulator(0), r"pyspark\.acc\S+\.Accumulator", r"counts .* runtime\.report"),
    "broadcast": (
        lambda spark: spark.broadcast([1]),
        r"pyspark\.\S*broadcast\.Broadcast",
        r"can be read .* \(b\.value\)",
    ),
    "rdd": (lambda spark: spark.parallelize([1]), r"pyspark\.\S*rdd\.RDD", r"lives on .* \(df\.write\.parquet\)"),
}


@pytest.mark.parametrize(
    ("name", "route"), [*(("accumulator", route) for route in ROUTES), ("broadcast", "list"), ("rdd", "closure")]
)
def test_sparks_objects_are_refused_before_anything_starts(one_jvm: Any, name: str, route: str) -> None:
    (into, text), (make, kind, words) = ROUTES[route], OBJECTS[name]
    value = make(one_jvm.sparkContext)
    function, *args = into(value) if isinstance(into(value), tuple) else (into(value),)
    with pytest.raises(PayloadError, match=text.format(kind=kind)) as caught:
        on_executors(1).run(function, *args)
    assert re.search(f"since (it|the {kind} in it) {words}|a {kind} that it uses {words}", str(caught.value))
    assert [*one_jvm.sparkContext._pickled_broadcast_vars] == []  # which the thread's next Spark job would send


def test_sparks_files_are_not_for_ranks(one_jvm: Any) -> None:
    from pyspark import SparkFiles

    with pytest.raises(TrainingError, match=r"RuntimeError: SparkFiles works in Spark's own .* as working_dir=\. "):
        on_executors(1).run(SparkFiles.get, "data.txt")


def test_a_name_is_in_the_spark_ui(one_jvm: Any) -> None:
    run = on_executors(2, name="digits").submit(trainings.rank)
    assert run.results() == [0, 1]
    jobs = one_jvm.sparkContext._jsc.sc().statusStore().jobsList(None)
    described = [jobs.apply(index).description() for index in range(jobs.size())]
    descriptions = {each.get() for each in described if each.isDefined()}
    assert f"distributor digits ({run.id}): rank on 2 ranks" in descriptions


def test_more_slots_than_there_can_be(one_jvm: Any) -> None:
    with pytest.raises(ResourceError, match=r"needs 5 task slots at once, but the cluster \(local\[4\]\) has 4: lower"):
        on_executors(5).run(trainings.rank)


@pytest.mark.slow
def test_tasks_of_other_sizes_hold_what_they_asked_for(two_executors: Any, tmp_path: Path) -> None:
    wide = on_executors(1, cpus_per_process=2).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: wide.status is Status.RUNNING)
    slots = Slots(two_executors, cluster_of(two_executors), make_job(num_processes=1))
    watch.until(lambda: slots.free() == 2)  # of four, and Spark counts a single running task
    narrow = on_executors((1, 4)).submit(trainings.rank)
    assert narrow.results(timeout=watch.DEADLINE) == [0, 1]
    (tmp_path / "go").touch()
    assert wide.results(timeout=watch.DEADLINE) == [0]


def test_gpus_that_spark_does_not_know_of(two_executors: Any) -> None:
    with pytest.raises(RuntimeError, match=r"'spark\.task\.resource\.gpu\.amount' was unset"):
        on_executors(2, use_gpu=True).run(trainings.rank)


@pytest.mark.long
def test_slots_that_are_busy_are_waited_for_until_the_start_timeout(one_jvm: Any, tmp_path: Path) -> None:
    busy = on_executors(3).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: busy.status is Status.RUNNING)
    with pytest.raises(StartError, match="it was waiting for 2 task slots: 1 is free; other jobs hold"):
        on_executors(2, max_processes_per_node=2, start_timeout=3).run(trainings.all_reduce)
    with pytest.raises(StartError, match=r"start_timeout=3 s: it was waiting for 2 task slots: 1 is free"):
        on_executors(2, start_timeout=3).run(trainings.rank)
    (tmp_path / "go").touch()
    assert busy.results(timeout=watch.DEADLINE) == [0, 1, 2]
    assert on_executors(4).submit(trainings.rank).results(timeout=watch.DEADLINE) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "how", ["group", *(pytest.param(how, marks=pytest.mark.long) for how in ("tag", "stage", "interruptAll"))]
)
def test_sparks_own_ways_to_cancel_end_the_ranks(one_jvm: Any, how: str, tmp_path: Path) -> None:
    context = one_jvm.sparkContext
    if how == "interruptAll" and context.version.startswith("3."):
        pytest.skip("classic sessions have interruptAll since Spark 4")
    if how == "group":
        context.setJobGroup("a-cell", "a notebook cell")
    try:
        run = on_executors(2, grace_period=1, max_restarts=1).submit(trainings.wait_for, str(tmp_path / "never"))
        watch.until(lambda: run.status is Status.RUNNING)
        if how == "group":
            context.cancelJobGroup("a-cell")
        elif how == "stage":  # the kill link of the Spark UI
            (stage,) = context.statusTracker().getActiveStageIds()
            context._jsc.sc().cancelStage(stage)
        elif how == "interruptAll":
            one_jvm.interruptAll()
        else:
            context.cancelJobsWithTag(f"distributor-{run.id}")
        with pytest.raises(RunCancelledError) as caught:
            run.result(timeout=watch.DEADLINE)
        assert "\tat " not in str(caught.value)
        assert len(run.attempts) == 1  # what somebody has cancelled does not start again
        watch.gone(run.id)  # Spark gives tasks two seconds before it kills them
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    assert on_executors(2).run(trainings.all_reduce) == 3.0


def let_workers_die(monkeypatch: pytest.MonkeyPatch, folder: Path, dies: int) -> None:
    """The first worker of a job dies before it begins, in as many jobs. Each leaves a file in the folder."""
    make_task = spark_scheduler._make_task

    def make_deadly(shipment: Any) -> Any:
        task = make_task(shipment)

        def deadly() -> Any:
            import os

            from pyspark import TaskContext

            if TaskContext.get().partitionId() == 0 and len(os.listdir(folder)) < dies:
                open(os.path.join(folder, str(os.getpid())), "w").close()
                os._exit(9)
            return task()

        return deadly

    monkeypatch.setattr(spark_scheduler, "_make_task", make_deadly)


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "ends"), [(1, None), (3, NodeLostError)])
def test_a_worker_that_dies_before_it_begins_is_replaced(
    one_jvm: Any, dies: int, ends: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one does that Spark is about to end for the sake of the job before."""
    let_workers_die(monkeypatch, tmp_path, dies)
    run = on_executors(2).submit(trainings.all_reduce)
    if ends is None:
        assert run.result() == 3.0
    else:
        with pytest.raises(ends, match="finished unsuccessfully. .*Python worker exited unexpectedly"):
            run.result()
    assert len(os.listdir(tmp_path)) == dies


def test_work_that_may_have_begun_is_not_repeated(
    one_jvm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tasks that no driver listens to begin at once, so that a worker that dies early may have trained."""
    let_workers_die(monkeypatch, tmp_path, 3)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NodeLostError, match="Python worker exited unexpectedly"):
            on_executors(1, driver_ports=(port, port)).run(trainings.all_reduce)
    assert len(os.listdir(tmp_path)) == 1


def test_an_interrupt_of_a_wait_does_not_end_the_run(one_jvm: Any, tmp_path: Path) -> None:
    """Spark's own handler would cancel all jobs."""

    def wait(file: str) -> str:
        import os
        import time

        while not os.path.exists(file):
            time.sleep(0.05)
        return "done"

    def interrupt(run: Run) -> None:
        watch.until(lambda: bool(run._callers.waiting))
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    assert (handler.__module__ or "").startswith("pyspark.")
    run = on_executors(1).submit(wait, str(tmp_path / "go"))
    watch.until(lambda: run.status is Status.RUNNING)
    for ask in (run.result, run.results, run.wait):
        interrupts = threading.Thread(target=interrupt, args=(run,))
        interrupts.start()
        with pytest.raises(KeyboardInterrupt):
            ask()
        interrupts.join()
        assert signal.getsignal(signal.SIGINT) is handler
    (tmp_path / "go").touch()
    assert run.result(watch.DEADLINE) == "done"


def test_a_run_that_is_placed_badly_is_placed_again(
    one_jvm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = strict(monkeypatch)
    run = on_executors(2, max_processes_per_node=2).submit(trainings.all_reduce)
    warning = f"Spark put more ranks on an executor than the 2 that it may host; placing run {run.id} again"
    watch.until(lambda: warning in caplog.messages)
    shipped[0]["most_tasks"] = 2
    assert run.results(watch.DEADLINE) == [3.0, 3.0]
    assert caplog.messages.count(warning) == 1


def strict(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes tasks refuse to be two on an executor. Returns the input of each job's tasks, which may still change."""
    from distributor.schedulers.spark import scheduler

    real, made = scheduler._shipment, list[Any]()

    def of(*given: Any) -> Any:
        made.append({**real(*given), "most_tasks": 1})
        return made[-1]

    monkeypatch.setattr(scheduler, "_shipment", of)
    return made


def test_resources_of_a_run_where_there_is_no_stage_level_scheduling(one_jvm: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"tasks of 2 CPUs .* no stage-level .* with master local\[4\]"):
        on_executors(2, cpus_per_process=2).run(trainings.rank)
    assert on_executors(2, cpus_per_process=1).run(trainings.all_reduce) == 3.0
    with pytest.raises(ResourceError, match="needs 3 task slots at once, at most 2 ranks per executor, .* has 2"):
        on_executors(3, max_processes_per_node=2).run(trainings.rank)


@pytest.mark.slow
def test_a_run_without_the_channel_still_ends_in_the_truth(
    one_jvm: Any, unreachable: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert on_executors(2).submit(trainings.all_reduce).results() == [3.0, 3.0]
    assert "cannot reach the driver at 127.0.0.1:1" in caplog.text
    run = on_executors(2).submit(trainings.fail_on_rank_1, "exit")
    with pytest.raises(TrainingError, match="rank 1 on .* failed: exited with code 3"):
        run.result(watch.DEADLINE)
    watch.gone()


def test_a_connection_that_is_cut_ends_both_sides(one_jvm: Any, wire: Proxy, tmp_path: Path) -> None:
    """Spark's own connections live on: the node itself finds out and stops its ranks."""
    run = TorchDistributor(2, False, False, heartbeat_timeout=5, grace_period=1).submit(
        trainings.wait_for, str(tmp_path / "never")
    )
    watch.until(lambda: run.status is Status.RUNNING)
    watch.until(lambda: run.snapshot().ranks_up == 2)
    wire.block()
    with pytest.raises(NodeLostError, match="heard (from it|nothing from the driver) for 5 s"):
        run.result(timeout=watch.DEADLINE)
    watch.gone(run.id)


def test_executors_need_not_have_the_package(two_executors: Any) -> None:
    files = on_executors(4).submit(lambda: __import__("distributor").__file__).results()
    assert all("package.zip" in file for file in files)


@pytest.mark.slow
def test_ranks_write_no_environment_into_workers(two_executors: Any) -> None:
    on_executors(4, env={"LEAKED": "1"}).run(trainings.all_reduce)
    seen = context_for_tasks(two_executors).parallelize(range(4), 4).map(lambda _: os.environ.get("LEAKED")).collect()
    assert seen == [None] * 4


def test_a_cluster_is_chosen_by_itself(two_executors: Any) -> None:
    run = TorchDistributor(4, use_gpu=False).submit(trainings.all_reduce)
    assert run.results() == [10.0] * 4
    assert run.placement is not None
    assert len(run.placement.nodes) == 2
    assert TorchDistributor(2, True, False).submit(trainings.all_reduce).results() == [3.0, 3.0]


@pytest.mark.long
def test_an_executor_that_spark_ends_is_an_error_that_says_why(sessions: Sessions, tmp_path: Path) -> None:
    """The job of somebody else is cancelled, and its task does not end in time."""
    reaper = {"enabled": "true", "killTimeout": "1s", "pollingInterval": "200ms"}
    session = sessions.get("local-cluster[1,2,1024]", **{f"spark.task.reaper.{key}": reaper[key] for key in reaper})
    ready = tmp_path / "ready"

    def sleep(_: object) -> None:
        ready.touch()
        time.sleep(60)

    def others() -> None:
        session.sparkContext.setJobGroup("others", "")
        with suppress(Exception):
            session.sparkContext.parallelize([0], 1).map(sleep).collect()

    run = on_executors(1).submit(trainings.wait_for, str(tmp_path / "never"))
    watch.until(lambda: run.status is Status.RUNNING)
    other = threading.Thread(target=others)
    other.start()
    watch.until(ready.exists)
    session.sparkContext.cancelJobGroup("others")
    with pytest.raises(NodeLostError) as caught:
        run.result(watch.DEADLINE)
    other.join(watch.DEADLINE)
    assert re.search(r"exited with code 5[07].* spark\.task\.reaper\.killTimeout is 1s: Spark ends", str(caught.value))
    assert "out of memory" not in str(caught.value)


@pytest.mark.long
def test_values_larger_than_sparks_limit_name_the_setting(sessions: Sessions, unreachable: None) -> None:
    """Where they cannot take the channel."""
    sessions.get("local[2]", **{"spark.driver.maxResultSize": "1m"})
    with pytest.raises(ResultError, match=r"larger than spark\.driver\.maxResultSize"):
        on_executors(1).run(lambda: b"x" * (8 << 20))
    assert on_executors(1).run(lambda: b"x" * 1000) == b"x" * 1000


@pytest.mark.slow
def test_dynamic_allocation_is_refused_where_barrier_mode_does_not_run_with_it(sessions: Sessions) -> None:
    dynamic = {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.shuffleTracking.enabled": "true"}
    sessions.get("local-cluster[1,1,1024]", **dynamic)
    with pytest.raises(ConfigurationError, match=r"spark\.dynamicAllocation\.enabled is true.*SPARK-24942"):
        on_executors().run(trainings.rank)
    sessions.get("local[2]", **dynamic)
    assert on_executors().run(trainings.all_reduce) == 3.0


@pytest.mark.long
def test_cpus_of_a_task_are_threads_of_a_rank(sessions: Sessions) -> None:
    sessions.get("local[4]", **{"spark.task.cpus": "2"})
    ranks = on_executors(2).submit(trainings.environment, "OMP_NUM_THREADS").results()
    assert ranks == [{"OMP_NUM_THREADS": "2"}] * 2
    with pytest.raises(ResourceError, match="has 2: lower"):
        on_executors(3).run(trainings.rank)


@pytest.fixture
def gpu_settings(tmp_path: Path) -> dict[str, str]:
    """Workers whose discovery script reports two GPUs each: Spark hands them out, nobody computes on them."""
    return two_gpus(
        tmp_path / "discover.sh",
        f"""i=0; until mkdir {tmp_path}/gpu$i 2>/dev/null; do i=$((i+2)); done
        echo "{{\\"name\\": \\"gpu\\", \\"addresses\\": [\\"$i\\", \\"$((i+1))\\"]}}"
        """,
    )


@pytest.fixture
def same_gpus(tmp_path: Path) -> dict[str, str]:
    """Workers of one machine that take the same two GPUs for theirs."""
    return two_gpus(tmp_path / "same.sh", """echo '{"name": "gpu", "addresses": ["0", "1"]}'""")


def visible() -> tuple[str, str]:
    return os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.slow
def test_ranks_see_their_nodes_gpus_in_order(sessions: Sessions, gpu_settings: dict[str, str]) -> None:
    sessions.get(CLUSTER, **gpu_settings, **{"spark.task.resource.gpu.amount": "1"})
    run = on_executors(4, use_gpu=True, env={CHECK_GPUS: "0"}).submit(visible)
    assert [local_rank for local_rank, _ in run.results()] == ["0", "1", "0", "1"]
    ours = [sorted(gpus.split(",")) for _, gpus in run.results()]
    assert ours[0] == ours[1] and ours[2] == ours[3] and ours[0] != ours[2]
    assert sorted(ours[0] + ours[2]) == ["0", "1", "2", "3"]
    assert on_executors(4).submit(visible).results() == [("0", ""), ("1", ""), ("0", ""), ("1", "")]
    with pytest.raises(ResourceError, match=r"5 task slots with 1 GPU each"):
        on_executors(5, use_gpu=True).run(trainings.rank)


@pytest.mark.long
@pytest.mark.usefixtures("fake_gpus")
def test_a_spark_without_executors_has_the_drivers_gpus(sessions: Sessions, same_gpus: dict[str, str]) -> None:
    """Its tasks have none, whatever the settings say: ranks do without the tasks, as on single-node clusters."""
    amounts = {"spark.task.resource.gpu.amount": "1", "spark.executor.resource.gpu.amount": "1"}
    script = same_gpus["spark.executor.resource.gpu.discoveryScript"]
    drivers = {"spark.driver.resource.gpu.amount": "2", "spark.driver.resource.gpu.discoveryScript": script}
    sessions.get("local[2]", **amounts, **drivers)
    assert on_executors(2, use_gpu=True).submit(visible).results() == [("0", "0,1"), ("1", "0,1")]
    assert on_executors(2, use_gpu=True).plan(visible).working_dir is None
    with pytest.raises(ResourceError, match="needs 3 GPUs, but this machine has 2 visible GPUs"):
        on_executors(3, use_gpu=True)


@pytest.mark.long
def test_a_task_with_two_gpus_hosts_two_ranks(sessions: Sessions, gpu_settings: dict[str, str]) -> None:
    sessions.get(CLUSTER, **gpu_settings, **{"spark.task.resource.gpu.amount": "2", "spark.task.cpus": "2"})
    run = on_executors(4, use_gpu=True, env={CHECK_GPUS: "0"}).submit(visible)
    assert [local_rank for local_rank, _ in run.results()] == ["0", "1", "0", "1"]
    assert run.placement is not None
    assert [len(node.ranks) for node in run.placement.nodes] == [2, 2]
    with pytest.raises(ConfigurationError, match=r"num_processes=3 must be a multiple of spark\.task\.resource\.gpu"):
        on_executors(3, use_gpu=True).run(trainings.rank)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_gpus")
def test_local_mode_takes_the_drivers_gpus(sessions: Sessions, same_gpus: dict[str, str]) -> None:
    script = same_gpus["spark.executor.resource.gpu.discoveryScript"]
    sessions.get(
        "local[2]", **{"spark.driver.resource.gpu.amount": "2", "spark.driver.resource.gpu.discoveryScript": script}
    )
    assert TorchDistributor(2, True).submit(visible).results() == [("0", "0,1"), ("1", "0,1")]
    with pytest.raises(ResourceError, match="needs 3 GPUs, but this machine has 2 visible GPUs"):
        TorchDistributor(3, True).run(visible)


@pytest.mark.slow
def test_too_few_executors_are_waited_for_and_then_named(sessions: Sessions) -> None:
    """A cluster that may still grow: its size is not known from its settings."""
    sessions.get("local[2]")
    seen = threading.Event()

    def most(_: object) -> None:
        seen.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distributor.schedulers.spark.slots.Slots.most", most)
        with pytest.raises(StartError, match=r"start_timeout=3 s: .*needs 3 task slots at once.* has 2"):
            on_executors(3, start_timeout=3).run(trainings.rank)
    assert seen.is_set()


@pytest.mark.long
def test_a_gibibyte_comes_back(tmp_path: Path) -> None:
    """With Spark's own settings, by which Spark would not bring it. In a driver of its own, which has these."""
    code = """
        from pyspark.sql import SparkSession
        from distributor import TorchDistributor

        spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

        def train():
            import torch

            return torch.arange(1 << 28, dtype=torch.int32)

        value = TorchDistributor(1, False, False).run(train)
        assert value.nbytes == 1 << 30
        assert value[-1].item() == (1 << 28) - 1
        print("came back")
    """
    ended = programs.run(tmp_path, code)
    assert "came back" in ended.stdout, ended.stderr[-2000:]


@pytest.mark.long
def test_a_session_that_is_stopped_cancels_its_runs(
    sessions: Sessions, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    session = sessions.get("local[4]", **{"spark.app.name": "to be stopped"})
    run = on_executors(2, grace_period=1, progress=False).submit(trainings.wait_for, str(tmp_path / "never"))
    watch.until(lambda: run.status is Status.RUNNING)
    capfd.readouterr()
    session.stop()
    with pytest.raises(RunCancelledError, match=f"run {run.id} was cancelled, because its Spark session was stopped"):
        run.result(watch.DEADLINE)
    watch.gone(run.id)
    assert "Traceback" not in capfd.readouterr().err


WITHOUT_JVM = """
    import os, signal, sys
    import trainings
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from distributor import ConfigurationError, StartError, Status, TorchDistributor
    SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").getOrCreate()
    run = TorchDistributor(1, False, False, progress=False, grace_period=1).submit(trainings.wait_for, sys.argv[2])
    while run.status is not Status.RUNNING:
        run.wait(0.05)
    SparkContext._gateway.proc.kill()
    try:
        run.result(90)
    except StartError as error:
        print("run:", error)
    for local_mode in (None, False, True):
        try:
            print(local_mode, TorchDistributor(1, local_mode, False, progress=False).run(trainings.rank))
        except ConfigurationError as error:
            print(local_mode, error)
"""


@pytest.mark.long
def test_after_the_end_of_sparks_jvm_errors_say_so(tmp_path: Path) -> None:
    ended = programs.run(tmp_path, WITHOUT_JVM, CLUSTER, tmp_path / "never")
    shown = [line for line in ended.stdout.splitlines() if line.startswith(("run", "None", "False", "True"))]
    assert len(shown) == 4, ended.stdout + ended.stderr
    assert "because Spark's JVM on the driver ended (killed, out of memory, or crashed" in shown[0]
    assert "which also ended the executors" in shown[0]
    for line in shown[1:3]:
        assert f"the active Spark session (master {CLUSTER}) cannot be used: its JVM has ended" in line
    assert shown[3] == "True 0"
    assert "distributor/" not in ended.stderr  # no traceback of ours
