"""Resources of a run, slots that are busy, and versions that differ between hosts."""

from __future__ import annotations

import os
import platform
import re
import threading
from pathlib import Path

import pytest
import trainings
import watch
from clusters import Cluster

from distributor import ResourceError, StartError, TorchDistributor
from distributor.schedulers.spark import slots

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.slow]


@pytest.mark.long
def test_cpus_of_a_run(cluster: Cluster) -> None:
    """Two CPUs for each rank of this run, where the session's own tasks have one; equal runs share a profile."""
    session = cluster.session()
    before = len(slots._profiles)
    for _ in range(2):
        run = TorchDistributor(2, use_gpu=False, cpus_per_process=2).submit(trainings.environment, "OMP_NUM_THREADS")
        assert [env["OMP_NUM_THREADS"] for env in run.results()] == ["2", "2"]
        assert run.placement is not None
        assert {node.host for node in run.placement.nodes} == {"host-a", "host-c"}  # host-b has but one
    assert len(slots._profiles) == before + 1
    assert session.sparkContext.parallelize(range(6), 6).map(lambda _: 1).sum() == 6  # its own tasks are as before


@pytest.mark.long
def test_memory_of_a_run(cluster: Cluster) -> None:
    cluster.session({"spark.executor.memoryOverhead": "600m", "spark.cores.max": "4"})
    run = TorchDistributor(2, use_gpu=False, memory_per_process="500m").submit(trainings.all_reduce)
    assert run.results() == [3.0, 3.0]
    assert run.placement is not None
    assert [node.local_world_size for node in run.placement.nodes] == [1, 1]
    with pytest.raises(ResourceError, match=r"memory_per_process=1,024 MiB, but each executor has 600 MiB beside"):
        TorchDistributor(2, use_gpu=False, memory_per_process="1g").run(trainings.rank)


@pytest.mark.long
def test_a_busy_cluster_is_waited_for(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = cluster.session()
    go, here = tmp_path / "go", tmp_path / "here"
    here.mkdir()

    def hold(index: int) -> int:
        import time

        (here / str(index)).touch()
        while not go.exists():
            time.sleep(0.05)
        return index

    holding = threading.Thread(target=lambda: session.sparkContext.parallelize(range(4), 4).map(hold).collect())
    holding.start()
    watch.until(lambda: len(os.listdir(here)) == 4)
    run = TorchDistributor(6, use_gpu=False).submit(trainings.all_reduce)
    watch.until(lambda: "waiting for 6 task slots: 2 are free" in run.snapshot().detail)
    with pytest.raises(StartError, match=r"start_timeout=5 s: it was waiting for 4 task slots: 2 are free"):
        TorchDistributor(4, use_gpu=False, start_timeout=5).run(trainings.all_reduce)
    go.touch()
    assert run.results() == [21.0] * 6
    holding.join()
    text = f"[distributor] run {run.id}: waiting for 6 task slots: 2 are free"
    assert text in capsys.readouterr().err


def test_runs_that_want_more_together_than_there_is(cluster: Cluster) -> None:
    """None of them may hold slots while it waits for more: Spark starts all tasks of a barrier stage, or none."""
    cluster.session()
    runs = [TorchDistributor(4, use_gpu=False).submit(trainings.all_reduce) for _ in range(3)]
    assert [run.results(timeout=2 * watch.DEADLINE) for run in runs] == [[10.0] * 4] * 3


@pytest.mark.long
def test_an_application_that_gets_no_executors_says_so(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Another application may hold them: with fewer slots than it needs, a run waits no longer than it is told to."""
    cluster.session({"spark.cores.max": "2"})
    with pytest.raises(StartError, match=r"waiting for executors: num_processes=4 needs .* has 2"):
        TorchDistributor(4, use_gpu=False, start_timeout=20).run(trainings.all_reduce)
    assert "num_processes=4 needs 4 task slots at once" in capsys.readouterr().err


SITE = """
import os, socket, sys
if socket.gethostname() == "host-c":
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.environ["SKEW"]))
"""


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for executors' import path with which host-c seems to have another torch."""
    folder = tmp_path_factory.mktemp("skew")
    (folder / "sitecustomize.py").write_text(SITE)
    for name, version in (("other", "9.9.0"), ("patch", "2.13.9")):
        metadata = folder / name / f"torch-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return folder


@pytest.mark.long
def test_another_torch_on_one_host(cluster: Cluster, skewed: Path) -> None:
    cluster.session({"spark.executorEnv.PYTHONPATH": str(skewed), "spark.executorEnv.SKEW": "other"})
    with pytest.raises(StartError, match=r"torch is \S+ on host-\S and \S+ on host-\S: ranks need") as caught:
        TorchDistributor(6, use_gpu=False).run(trainings.all_reduce)
    assert "host-c" in str(caught.value) and "9.9.0" in str(caught.value)


@pytest.mark.long
def test_another_build_of_torch_on_one_host(cluster: Cluster, skewed: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster.session({"spark.executorEnv.PYTHONPATH": str(skewed), "spark.executorEnv.SKEW": "patch"})
    assert TorchDistributor(6, use_gpu=False).run(trainings.all_reduce) == 21.0
    warnings = [record.getMessage() for record in caplog.records if "has torch" in record.getMessage()]
    assert warnings and all("host-c" in text and "2.13.9" in text for text in warnings)


@pytest.mark.long
def test_another_python_on_the_driver(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    session = cluster.session()
    version = re.escape(".".join(platform.python_version_tuple()[:2]))
    with monkeypatch.context() as patch:
        patch.setattr(session.sparkContext, "pythonVer", "3.8")
        with pytest.raises(StartError, match=rf"failed on 10[\d., ]+: .*version: {version}.* driver: 3\.8, .*PYSPARK"):
            TorchDistributor(2, use_gpu=False).run(trainings.rank)
