"""A real Spark Connect server on the cluster, with clients on its machine and on another host."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]

TESTS = Path(__file__).parents[1] / "support"

#: What a client does; its answers are the lines of a file.
CLIENT = """
import json, os, sys
from unittest.mock import patch
import trainings
from distributor.machine import network
from pyspark.sql import SparkSession
from distributor import TorchDistributor, TrainingError, ResourceError, StartError

url, answers = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()

def answer(**fields):
    with open(answers, "a") as file:
        file.write(json.dumps(fields) + "\\n")

def talk():
    print("hello from", os.environ["RANK"], flush=True)
    return os.environ["GLOO_SOCKET_IFNAME"], os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]
"""


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> Iterator[str]:
    cluster.stop()  # its executors are the server's now
    settings = {"spark.executor.resource.gpu.amount": "3", "spark.connect.grpc.maxInboundMessageSize": str(64 << 20)}
    yield cluster.hosts.connect_server(**settings)
    cluster.hosts.kill("connect")


@pytest.fixture(params=[pytest.param("the-servers-machine", marks=pytest.mark.long), "another-host"])
def client(request: pytest.FixtureRequest, cluster: Cluster, url: str, tmp_path: Path) -> Callable[[str], Any]:
    """Runs code in a process of its own, and returns what it answers, prints and warns of."""
    before = cluster.hosts.within("host-b") if request.param == "another-host" else []

    def run(code: str) -> tuple[list[dict[str, Any]], str, str]:
        answers = tmp_path / "answers"
        script = tmp_path / "client.py"
        script.write_text(CLIENT + textwrap.dedent(code))
        done = subprocess.run(
            [*before, "env", f"PYTHONPATH={TESTS}:{TESTS.parents[1]}", sys.executable, str(script), url, str(answers)],
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in answers.read_text().splitlines()], done.stdout, done.stderr

    return run


@pytest.mark.long
def test_a_client_of_connect_gets_values_errors_and_resources(client: Callable[[str], Any]) -> None:
    """One client for all, since it takes seconds to start: values, placement, live lines, typed errors, resources."""
    answers, printed, warned = client(
        """
        run = TorchDistributor(6, use_gpu=False).submit(talk)
        answer(values=run.results(), hosts=[node.host for node in run.placement.nodes])

        try:
            TorchDistributor(2, use_gpu=False).run(trainings.fail_on_rank_1, "raise")
        except TrainingError as error:
            answer(error=str(error).splitlines()[0], cause=type(error.__cause__).__name__, rank=error.rank)

        run = TorchDistributor(2, gpus_per_process=3, cpus_per_process=2).submit(talk)
        answer(values=run.results(), hosts=[node.host for node in run.placement.nodes])

        weights = os.urandom(1 << 20) * 100
        answer(length=TorchDistributor(1, use_gpu=False).run(lambda: len(weights)))

        try:
            TorchDistributor(1, gpus_per_process=4).run(talk)
        except ResourceError as error:
            answer(error=str(error))

        with patch.multiple(network, address_towards=lambda host: "127.0.0.1", is_own=lambda address: False):
            run = TorchDistributor(6, use_gpu=False).submit(talk)  # nobody finds this client there
            answer(values=run.results(), hosts=[node.host for node in run.placement.nodes])

        go, busy = answers + "-go", TorchDistributor(5, use_gpu=False)
        busy = busy.submit(trainings.wait_for, go)
        while busy.status.value != "running":
            busy.wait(0.05)
        try:
            TorchDistributor(2, use_gpu=False, start_timeout=6).run(talk)
        except StartError as error:
            answer(error=str(error))
        open(go, "w").close()
        busy.result()
        """
    )
    first, failed, with_gpus, large, refused, alone, late = answers
    assert sorted(first["hosts"]) == ["host-a", "host-b", "host-c"]
    assert sorted({interface for interface, _, _ in first["values"]}) == ["enp3s0", "ens5", "eth0"]
    assert any(line.startswith("[distributor] run ") for line in warned.splitlines())
    for rank in range(6):
        assert f"hello from {rank}\n" in printed
    assert failed["error"].startswith("rank 1 on host-") and failed["cause"] == "ValueError" and failed["rank"] == 1
    assert sorted(with_gpus["hosts"]) == ["host-a", "host-c"]
    assert [threads for _, threads, _ in with_gpus["values"]] == ["2", "2"]
    seen = {host: devices.split(",") for host, (_, _, devices) in zip(with_gpus["hosts"], with_gpus["values"])}
    assert sorted(seen["host-c"]) == ["1", "3", "5"]
    assert large["length"] == 100 << 20
    assert refused["error"].startswith("gpus_per_process=4, but ")
    assert sorted(alone["values"]) == sorted(first["values"])
    assert sorted(alone["hosts"]) == ["host-a", "host-b", "host-c"]
    assert "cannot reach the driver at 127.0.0.1:" in warned
    assert "start_timeout=6 s: it was waiting for task slots: other jobs may hold them" in late["error"]
