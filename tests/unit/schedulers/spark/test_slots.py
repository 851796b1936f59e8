"""What each Spark task of a run hosts and is to have, by what is asked and what the cluster has."""

import threading

import pytest
from at_once import at_once
from jobs import make_job
from pyspark.resource import ResourceProfile

from distributor.errors import ConfigurationError, ResourceError
from distributor.launch.torchrun import Torchrun
from distributor.schedulers.spark import slots
from distributor.schedulers.spark.slots import Cluster, Slots, model_profile, node_limit, shape
from distributor.values.job import Function, TaskProfile
from distributor.values.options import Resources

GIB = 1 << 30


def cluster(**fields):
    return Cluster(**{"master": "spark://host:7077", "executor_cores": 4, **fields})


def asked(num_processes=4, use_gpu=False, **fields):
    return Resources(num_processes, use_gpu, **fields)


@pytest.mark.parametrize(
    ("resources", "there", "expected"),
    [
        pytest.param(asked(), cluster(), (1, None), id="nothing"),
        pytest.param(asked(cpus_per_process=2), cluster(), (1, TaskProfile(2)), id="cpus"),
        pytest.param(asked(cpus_per_process=2), cluster(task_cpus=2), (1, None), id="cpus-that-tasks-have"),
        pytest.param(asked(cpus_per_process=1), cluster(task_cpus=2), (1, TaskProfile(1)), id="fewer-cpus"),
        pytest.param(asked(), cluster(no_profiles="nowhere"), (1, None), id="nothing-needs-no-profile"),
        # GPUs
        pytest.param(asked(use_gpu=True), cluster(task_gpus="1", executor_gpus=4), (1, None), id="gpu"),
        pytest.param(asked(use_gpu=True), cluster(task_gpus="2", executor_gpus=4), (2, None), id="ranks-by-gpus"),
        pytest.param(asked(use_gpu=True), cluster(executor_gpus=4), (1, TaskProfile(1, 1)), id="tasks-have-none"),
        pytest.param(
            asked(use_gpu=True, gpus_per_process=1),
            cluster(task_gpus="0.25", executor_gpus=1),
            (1, TaskProfile(1, 1)),
            id="tasks-share",
        ),
        pytest.param(
            asked(use_gpu=True, gpus_per_process=2),
            cluster(task_gpus="1", executor_gpus=4),
            (1, TaskProfile(1, 2)),
            id="two-gpus",
        ),
        pytest.param(
            asked(use_gpu=True, gpus_per_process=2),
            cluster(task_gpus="4", executor_gpus=4),
            (2, None),
            id="two-of-4",
        ),
        pytest.param(
            asked(3, use_gpu=True, gpus_per_process=2),
            cluster(task_gpus="4", executor_gpus=4),
            (1, TaskProfile(1, 2)),
            id="ranks-that-do-not-fill-tasks",
        ),
        pytest.param(
            asked(use_gpu=True, cpus_per_process=2),
            cluster(task_gpus="2", executor_gpus=2),
            (2, TaskProfile(4, 2)),
            id="cpus-of-two-ranks",
        ),
        # Ranks of a node
        pytest.param(asked(max_processes_per_node=1), cluster(), (1, None), id="limit"),
        pytest.param(asked(memory_per_process=GIB), cluster(memory_beside_heap=2 * GIB), (1, None), id="memory"),
    ],
)
def test_the_shape_of_a_task(resources, there, expected):
    assert shape(resources, there) == expected


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_processes_per_node": 3}, 3),
        ({"memory_per_process": GIB}, 2),
        ({"memory_per_process": GIB, "max_processes_per_node": 1}, 1),
        ({"memory_per_process": 100 << 20, "max_processes_per_node": 3}, 3),
    ],
)
def test_ranks_of_one_executor(fields, limit):
    assert node_limit(asked(**fields), cluster(memory_beside_heap=2 * GIB + 1)) == limit


@pytest.mark.parametrize(
    ("resources", "there", "error", "words"),
    [
        (asked(use_gpu=True), cluster(), ResourceError, "'spark.task.resource.gpu.amount' was unset"),
        (
            asked(use_gpu=True),
            cluster(executor_gpus=4, no_profiles="no"),
            ResourceError,
            "'spark.task.resource.gpu.amount' was unset",
        ),
        (asked(use_gpu=True), cluster(task_gpus="half"), ConfigurationError, "is 'half': it must be a whole number"),
        (asked(use_gpu=True), cluster(task_gpus="0.5"), ConfigurationError, "is 0.5: ranks cannot share a GPU"),
        (asked(use_gpu=True), cluster(task_gpus="-1"), ConfigurationError, "is -1: ranks cannot share a GPU"),
        (asked(use_gpu=True), cluster(task_gpus="3"), ConfigurationError, "num_processes=4 must be a multiple of"),
        (
            asked(use_gpu=True, gpus_per_process=2),
            cluster(task_gpus="1", executor_gpus=1),
            ResourceError,
            "gpus_per_process=2, but spark.executor.resource.gpu.amount gives each executor 1",
        ),
        (
            asked(use_gpu=True, max_processes_per_node=1),
            cluster(task_gpus="2", executor_gpus=2),
            ResourceError,
            "allows 1 rank per executor, but each task hosts 2",
        ),
        (
            asked(cpus_per_process=8),
            cluster(),
            ResourceError,
            "needs 8 cores (cpus_per_process=8), but each",
        ),
        (
            asked(cpus_per_process=2),
            cluster(no_profiles="there is no stage-level scheduling"),
            ConfigurationError,
            "this session cannot run tasks of 2 CPUs (spark.task.cpus=1",
        ),
        (
            asked(use_gpu=True, gpus_per_process=2),
            cluster(task_gpus="1", executor_gpus=2, no_profiles="there is none"),
            ConfigurationError,
            "this session cannot run tasks of 1 CPU and 2 GPUs",
        ),
    ],
)
def test_impossible_requests_for_tasks_are_refused(resources, there, error, words):
    with pytest.raises(error) as caught:
        shape(resources, there)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("num_gpus", "there", "expected"),
    [
        pytest.param(0, cluster(task_gpus="1"), None, id="cpus"),
        pytest.param(1, cluster(task_gpus="0.25", executor_gpus=1), None, id="tasks-share"),
        pytest.param(2, cluster(task_gpus="2", executor_gpus=2), None, id="tasks-have-two"),
        pytest.param(1, cluster(master="local[4]"), None, id="tasks-of-the-driver"),
        pytest.param(1, cluster(executor_gpus=1), TaskProfile(1, 0.25), id="all-cores"),
        pytest.param(1, cluster(executor_gpus=2, task_cpus=2), TaskProfile(2, 1), id="all-cores-of-two-cpus"),
        pytest.param(1, cluster(executor_gpus=8, executor_cores=4), TaskProfile(1, 1), id="more-gpus-than-cores"),
        pytest.param(1, cluster(executor_gpus=1, executor_cores=None), TaskProfile(1, 0.25), id="cores-are-unknown"),
        pytest.param(2, cluster(task_gpus="0.5", executor_gpus=4), TaskProfile(1, 2), id="two-gpus"),
    ],
)
def test_what_tasks_request_that_feed_models(num_gpus, there, expected):
    assert model_profile(num_gpus, there, "4.0.0") == expected


@pytest.mark.parametrize(
    ("num_gpus", "there", "spark", "words"),
    [
        (1, cluster(executor_gpus=1), "3.5.6", "before Spark 4.0 (this is 3.5.6): start a session with"),
        (1, cluster(executor_gpus=1), "3.5.6", "spark.task.resource.gpu.amount=0.25"),
        (1, cluster(), "4.0.0", "spark.executor.resource.gpu.amount gives each executor 0"),
        (2, cluster(executor_gpus=1), "4.0.0", "spark.task.resource.gpu.amount=2"),
        (1, cluster(executor_gpus=1, no_profiles="there are none"), "4.0.0", "0 GPUs, and there are none: start"),
    ],
)
def test_a_model_on_gpus_names_the_settings_that_are_missing(num_gpus, there, spark, words):
    with pytest.raises(ConfigurationError) as caught:
        model_profile(num_gpus, there, spark)
    assert words in str(caught.value)


def test_too_little_memory_for_one_rank_is_refused():
    with pytest.raises(ResourceError, match=r"memory_per_process=8,192 MiB, but each executor has 1,024 MiB "):
        node_limit(asked(memory_per_process=8 * GIB), cluster(memory_beside_heap=GIB))


@pytest.mark.parametrize(
    ("there", "fields", "cores", "running", "usable"),
    [
        pytest.param(cluster(), {}, 4, 0, 4, id="cores"),
        pytest.param(cluster(), {}, 4, 3, 1, id="busy"),
        pytest.param(cluster(task_cpus=2), {}, 5, 1, 1, id="two-cpus"),
        pytest.param(cluster(), {"task_profile": TaskProfile(3)}, 8, 2, 2, id="profile"),
        pytest.param(cluster(executor_gpus=2, task_gpus="1"), {"use_gpu": True}, 8, 0, 2, id="gpus"),
        pytest.param(cluster(executor_gpus=2, task_gpus="1"), {"use_gpu": True}, 8, 2, 0, id="busy-gpus"),
        pytest.param(cluster(executor_gpus=2, task_gpus="1"), {}, 8, 0, 2, id="gpus-that-nobody-wants"),
        pytest.param(cluster(executor_gpus=2, task_gpus="0.25"), {}, 8, 0, 8, id="shared-gpus-that-nobody-wants"),
        pytest.param(cluster(executor_gpus=4), {"task_profile": TaskProfile(1, 2)}, 8, 3, 2, id="gpus-of-a-profile"),
        pytest.param(cluster(), {"max_processes_per_node": 3}, 8, 2, 3, id="limit"),
        pytest.param(
            cluster(executor_gpus=8, task_gpus="2"),
            {"use_gpu": True, "ranks_per_task": 2, "max_processes_per_node": 5},
            8,
            0,
            2,
            id="limit-of-ranks",
        ),
        pytest.param(cluster(), {}, 0, 0, 0, id="the-driver"),
    ],
)
def test_slots_of_an_executor(there, fields, cores, running, usable):
    job = make_job(
        **{
            "run_id": "run",
            "num_processes": 4,
            "target": Function("train", b""),
            "use_gpu": False,
            "launch": Torchrun(),
            **fields,
        }
    )
    assert Slots(None, there, job)._usable(cores, running) == usable


def test_memory_that_cannot_be_read():
    with pytest.raises(ConfigurationError, match="memory_per_process depends on the memory that executors have"):
        node_limit(asked(memory_per_process=GIB), cluster(memory_beside_heap=None))
    assert node_limit(asked(), cluster(memory_beside_heap=None)) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["needs 4 task slots at once, but", "spark.executor.cores, or lower spark.task.cpus"]),
        (
            {"task_profile": TaskProfile(2)},
            ["task slots of 2 CPUs at once, but", "executor.cores, or lower cpus_per_process"],
        ),
        (
            {"max_processes_per_node": 1},
            [
                "at once, at most 1 rank per executor, but",
                "instances or max_processes_per_node, or ask",
            ],
        ),
    ],
)
def test_the_error_of_too_few_slots_names_what_to_raise(fields, words):
    job = make_job(
        **{
            "run_id": "run",
            "num_processes": 4,
            "target": Function("train", b""),
            "use_gpu": False,
            "launch": Torchrun(),
            **fields,
        }
    )
    told = Slots(None, cluster(), job).too_few(3)
    for word in [*words, "has 3: lower num_processes"]:
        assert word in told


def test_room_on_other_hosts_does_not_count_the_jobs_own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark lists executors by other ports than tasks see, and on YARN by the names of hosts."""
    hosts = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    monkeypatch.setattr(slots.socket, "getaddrinfo", lambda host, _: [(0, 0, 0, "", (hosts[host], 0))])
    there = [slots.Executor("a:1", 3, 1), slots.Executor("b:1", 1, 1), slots.Executor("c:1", 2, 1)]
    monkeypatch.setattr(slots, "executors", lambda session: iter(there))
    monkeypatch.setattr(slots, "profiled", lambda session: {})
    slots._names_of.cache_clear()
    job = make_job("3f2a", 3, Function("train", b""), False, node_limit=1)
    room = Slots(None, Cluster("spark://a:7077"), job).room_beside
    for name in ("a", "b", "c"), (hosts["a"], hosts["b"], hosts["c"]):
        a, b, c = name
        assert room((), {a: 1, b: 1, c: 1}) == 3
        assert room((b,), {a: 1, b: 1, c: 1}) == 2
        assert room((b,), {a: 1, b: 1}) == 2
        there[2] = slots.Executor("c:1", 1, 1)
        assert room((b,), {a: 1, b: 1}) == 1
        there[2] = slots.Executor("c:1", 2, 1)
    there[:] = [slots.Executor("a:1", 1, 1), slots.Executor("a:2", 1, 1), slots.Executor("a:3", 1, 1)]
    assert room((), {"a": 2}) == 2, "two of the three are the job's own"
    slots._names_of.cache_clear()


@pytest.mark.parametrize(
    ("settings", "most"),
    [({"spark.executor.instances": "2"}, None), ({"spark.executor.instances": "2", "spark.cores.max": "16"}, 16)],
)
def test_a_standalone_cluster_ignores_the_number_of_instances(monkeypatch, settings, most):
    monkeypatch.setattr(slots, "conf", lambda session, name: settings.get(name))
    job = make_job("3f2a", 8, Function("train", b""), False)
    for master, expected in ("spark://a:7077", most), ("yarn", 8):
        assert Slots(None, Cluster(master, executor_cores=4), job).most() == expected


def test_first_runs_at_the_same_moment_share_a_profile(monkeypatch):
    """Spark Connect gives it a number through the session that is active in the thread: it stays another one."""
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    asked = []

    class SparkSession:
        __module__ = "pyspark.sql.connect.session"
        _active_session = threading.local()

    monkeypatch.setattr(ResourceProfile, "id", property(lambda _: asked.append(SparkSession._active_session.session)))
    session = SparkSession()

    def use():
        SparkSession._active_session.session = "another"
        return slots.profile(session, TaskProfile(2)), SparkSession._active_session.session

    made = at_once(*[use] * 8)
    assert {each for each, _ in made} == {slots.profile(session, TaskProfile(2))}
    assert {each for _, each in made} == {"another"}
    assert set(asked) == {session}


@pytest.mark.parametrize(
    ("fields", "profiled", "usable"),
    [
        pytest.param({"task_profile": TaskProfile(1, 1)}, [TaskProfile(1, 4)], 0, id="one-task-has-all-gpus"),
        pytest.param({"task_profile": TaskProfile(1, 1)}, [TaskProfile(1, 1)] * 3, 1, id="one-gpu-is-left"),
        pytest.param({}, [TaskProfile(4)], 11, id="four-cpus-beside-a-plain-task"),
        pytest.param({}, [], 14, id="plain-tasks"),
    ],
)
def test_what_running_tasks_with_a_profile_hold(fields, profiled, usable):
    there = cluster(executor_gpus=4)
    job = make_job("run", 4, Function("train", b""), False, **fields)
    running = max(2, len(profiled)) if "task_profile" not in fields else len(profiled)
    assert Slots(None, there, job)._usable(16, running, profiled) == usable
