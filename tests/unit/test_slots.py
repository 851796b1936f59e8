"""What each Spark task of a run hosts and is to have, by what is asked and what the cluster has."""

import pytest

from distributor.errors import ConfigurationError, ResourceError
from distributor.job import Resources, TaskProfile
from distributor.schedulers.spark_slots import Cluster, shape

GIB = 1 << 30


def cluster(**fields):
    return Cluster(**{"master": "spark://host:7077", "executor_cores": (4,), **fields})


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
            id="two-of-four",
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
        pytest.param(asked(max_processes_per_node=4), cluster(), (1, None), id="limit-that-holds"),
        pytest.param(asked(max_processes_per_node=2), cluster(), (1, TaskProfile(2)), id="two-of-four-cores"),
        pytest.param(asked(max_processes_per_node=1), cluster(), (1, TaskProfile(3)), id="one"),
        pytest.param(asked(6, max_processes_per_node=3), cluster(), (3, TaskProfile(3)), id="three-of-four-cores"),
        pytest.param(asked(4, max_processes_per_node=3), cluster(), (1, TaskProfile(2)), id="three-do-not-divide-four"),
        pytest.param(
            asked(4, use_gpu=True, max_processes_per_node=2),
            cluster(task_gpus="1", executor_gpus=2, executor_cores=(8,)),
            (1, None),
            id="gpus-limit-already",
        ),
        pytest.param(
            asked(3, max_processes_per_node=1), cluster(executor_cores=(3, 1, 2), uniform=False), (1, None), id="uneven"
        ),
        pytest.param(
            asked(2, max_processes_per_node=1),
            cluster(executor_cores=(3, 2), uniform=False),
            (1, TaskProfile(2)),
            id="nearly-even",
        ),
        pytest.param(
            asked(max_processes_per_node=1), cluster(executor_cores=(), uniform=False), (1, None), id="unknown"
        ),
        pytest.param(
            asked(memory_per_process=GIB), cluster(memory_beside_heap=2 * GIB), (1, TaskProfile(2)), id="memory-for-two"
        ),
        pytest.param(
            asked(memory_per_process=GIB, max_processes_per_node=1),
            cluster(memory_beside_heap=2 * GIB),
            (1, TaskProfile(3)),
            id="the-smaller-limit",
        ),
    ],
)
def test_the_shape_of_a_task(resources, there, expected):
    assert shape(resources, there) == expected


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
            asked(cpus_per_process=8),
            cluster(),
            ResourceError,
            "needs 8 cores (cpus_per_process=8), and each executor has 4",
        ),
        (
            asked(cpus_per_process=2),
            cluster(no_profiles="there is no stage-level scheduling"),
            ConfigurationError,
            "tasks of 2 CPUs are not what this session gives (spark.task.cpus=1",
        ),
        (
            asked(use_gpu=True, gpus_per_process=2),
            cluster(task_gpus="1", executor_gpus=2, no_profiles="there is none"),
            ConfigurationError,
            "tasks of 1 CPU and 2 GPUs are not what this session gives",
        ),
        (
            asked(memory_per_process=8 * GIB),
            cluster(memory_beside_heap=GIB),
            ResourceError,
            "memory_per_process=8,192 MiB, but each executor has 1,024 MiB beside its JVM heap",
        ),
    ],
)
def test_what_cannot_be(resources, there, error, words):
    with pytest.raises(error) as caught:
        shape(resources, there)
    assert words in str(caught.value)
