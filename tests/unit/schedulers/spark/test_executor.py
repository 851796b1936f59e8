"""The executor of a Python worker."""

import subprocess
import sys

import pytest

from distributor.schedulers.spark import executor


@pytest.mark.parametrize(
    ("arguments", "host"),
    [
        (
            ["org.apache.spark.executor.CoarseGrainedExecutorBackend", "--hostname", "10.0.0.2", "--cores", "1"],
            "10.0.0.2",
        ),
        (["org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend", "--hostname", "host"], "host"),
        (["org.apache.spark.executor.CoarseGrainedExecutorBackend"], None),
        (["org.apache.spark.deploy.SparkSubmit", "train.py", "--hostname", "the-jobs-own"], None),
    ],
)
def test_what_an_executor_calls_its_host(arguments, host):
    command = [sys.executable, "-c", "print(flush=True); input()", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert executor.executor_host(process.pid) == host
        process.communicate(b"\n")
    assert executor.executor_host(process.pid) is None
