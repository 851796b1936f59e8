"""Names of other launchers, on real ranks: on this machine, and on executors."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import watch
from sessions import Sessions

from distributor import ConfigurationError, TrainingError
from distributor.compat import azureml, trial
from distributor.compat.databricks import air, serverless_gpu
from distributor.compat.databricks.serverless_gpu import runtime
from distributor.compat.places import Place, look
from distributor.schedulers.spark.slots import Executor
from distributor.values.environment import CHECK_GPUS

pytestmark = pytest.mark.slow


@pytest.fixture
def anywhere(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names decide by the active session where to train; on this machine there must be none."""
    monkeypatch.delenv(trial.VARIABLE, raising=False)
    if local:
        monkeypatch.delitem(sys.modules, "pyspark", raising=False)


@pytest.fixture
def on_cpus(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trial.VARIABLE, "2")


def who(offset: int = 0) -> list[int]:
    return [
        runtime.get_global_rank() + offset,
        runtime.get_world_size(),
        runtime.get_node_rank() * runtime.get_local_world_size() + runtime.get_local_rank(),
    ]


def whose_group() -> int:
    import torch.distributed as dist

    dist.init_process_group()
    return runtime.get_global_rank(dist.group.WORLD)


def seen(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def seen_as(variable: str, *, name: str) -> dict[str, str | None]:
    return {name: os.environ.get(variable)}


def fails() -> None:
    raise ValueError("bad batch")


@pytest.mark.long_on_executors
def test_distributed_returns_a_value_of_each_rank_in_order(on_cpus: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        values = serverless_gpu.distributed(gpus=8, gpu_type="H100", remote=True)(who).distributed(offset=10)
    assert values == [[10, 2, 0], [11, 2, 1]]
    assert "DISTRIBUTOR_COMPAT_CPU=2: 2 ranks on CPUs train, whatever @distributed(gpus=8" in caplog.text
    assert "GPU types are not checked. To train as asked, unset DISTRIBUTOR_COMPAT_CPU" in caplog.text


@pytest.mark.long_on_executors
def test_the_second_generations_decorator_returns_values_in_order(on_cpus: None) -> None:
    assert air.distributed(num_accelerators=16, accelerator_type="GPU_8xH100")(whose_group).distributed() == [0, 1]


@pytest.mark.long_on_executors
def test_ranks_log_to_the_notebooks_run_of_mlflow(on_cpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "7")
    values = serverless_gpu.distributed(gpus=2)(seen).distributed("MLFLOW_RUN_ID")
    assert values == [{"MLFLOW_RUN_ID": "7"}] * 2


@serverless_gpu.distributed(gpus=1, gpu_type="H100")
def decorated_above(number: int) -> int:
    return number + 1


@pytest.mark.long
def test_a_decorated_function_of_a_module_travels(on_cpus: None) -> None:
    assert decorated_above.distributed(1) == [2, 2]


@pytest.mark.long
def test_wrong_arguments_of_the_function_are_told_at_once(on_cpus: None) -> None:
    with pytest.raises(ConfigurationError, match=r"decorated_above\(number\) cannot be called with these arguments"):
        decorated_above.distributed()


@pytest.mark.long_on_executors
def test_an_error_of_a_rank_is_the_users(on_cpus: None) -> None:
    with pytest.raises(TrainingError, match="ValueError: bad batch") as caught:
        serverless_gpu.distributed(gpus=2)(fails).distributed()
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.usefixtures("fake_gpus")
@pytest.mark.long
def test_each_rank_checks_its_gpu_before_the_function(
    make_local: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch finds no GPU in these ranks, whatever the environment says of devices."""
    monkeypatch.delenv(trial.VARIABLE, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7000,7001")

    def trains() -> None:
        print("has begun")

    with pytest.raises(
        TrainingError, match="GPU type 'H100' was asked for, but torch finds no GPU in this rank"
    ) as caught:
        serverless_gpu.distributed(gpus=2, gpu_type="H100", remote=False)(trains).distributed()
    assert isinstance(caught.value.__cause__, ConfigurationError)
    assert "has begun" not in "".join(capfd.readouterr())


@pytest.mark.long
def test_executors_are_needed_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trial.VARIABLE, raising=False)
    pytest.importorskip("pyspark")
    monkeypatch.setattr("distributor.schedulers.spark.sessions.active_session", lambda: None)
    with pytest.raises(ConfigurationError, match="none is active: .*leave out remote=True to train on this machine"):
        serverless_gpu.distributed(gpus=1, remote=True)(who).distributed()


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.usefixtures("fake_gpus")
def test_the_gpus_of_the_place_where_a_run_would_train(sessions: Sessions) -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    sessions.get("local[2]")
    assert look(None, gpus) == look(False, gpus) == Place(gpus=3)
    assert look(True, gpus) == Place(gpus=3)
    sessions.get("local-cluster[2,1,1024]")
    assert look(None, gpus) == Place(executors=True, gpus=0)
    sessions.stop()
    assert look(False, gpus).exists is False


@pytest.mark.spark
@pytest.mark.long
def test_all_gpus_of_the_executors_are_taken_and_checked(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark is told of one GPU for each of two executors; torch finds none in their ranks."""
    monkeypatch.delenv(trial.VARIABLE, raising=False)
    script = tmp_path / "discover.sh"
    script.write_text(
        f"""#!/bin/sh
        i=0; while ! mkdir {tmp_path}/$i 2>/dev/null; do i=$((i+1)); done
        echo "{{\\"name\\": \\"gpu\\", \\"addresses\\": [\\"$i\\"]}}"
        """
    )
    script.chmod(0o755)
    settings = {
        f"spark.{who}.resource.gpu.{name}": value
        for who in ("worker", "executor")
        for name, value in (("amount", "1"), ("discoveryScript", str(script)))
    }
    settings |= {"spark.task.resource.gpu.amount": "1", f"spark.executorEnv.{CHECK_GPUS}": "0"}
    sessions.get("local-cluster[2,1,1024]", **settings)
    watch.until(lambda: look(None, {}) == Place(executors=True, gpus=2))
    with monkeypatch.context() as patched:
        patched.setattr("distributor.schedulers.spark.slots.executors", lambda session: iter([Executor("", 0, 0)]))
        assert look(None, {}) == Place(executors=True, gpus=None)
    assert len(serverless_gpu.distributed()(who).distributed()) == 2
    with pytest.raises(TrainingError, match="ranks? [01].* on .*GPU type 'H100' was asked for, but torch finds no GPU"):
        air.distributed(accelerator_type="GPU_1xH100", num_accelerators=2)(who).distributed()


def nodes() -> list[list[int]]:
    """The rank and the node of each rank."""
    import torch.distributed as dist

    dist.init_process_group()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [dist.get_rank(), runtime.get_node_rank()])
    return gathered


@pytest.mark.spark
@pytest.mark.long
def test_each_instance_is_an_executor(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trial.VARIABLE, raising=False)
    sessions.get("local-cluster[2,1,1024]")
    one_each = azureml.PyTorchDistribution(process_count_per_instance=1)
    assert azureml.run(nodes, distribution=one_each, instance_count=2) == [[0, 0], [1, 1]]


MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.long_on_executors
def test_ranks_find_the_variables_that_azure_sets(anywhere: None) -> None:
    two = {"process_count_per_instance": 2}
    found = azureml.run(seen, *TORCH, distribution=azureml.PyTorchDistribution(**two), environment_variables={"A": "1"})
    assert (found["RANK"], found["WORLD_SIZE"], found["NODE_RANK"]) == ("0", "2", "0")
    assert None not in found.values()
    where = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")
    names = (*TORCH, *MPI, *where, "A")
    found = azureml.run(seen, *names, distribution=azureml.MpiDistribution(**two), environment_variables={"A": "1"})
    assert None not in found.values()
    assert (found["OMPI_COMM_WORLD_RANK"], found["OMPI_COMM_WORLD_SIZE"], found["A"]) == ("0", "2", "1")
    assert found["AZ_BATCH_MASTER_NODE"] == f"{found['MASTER_ADDR']}:{found['MASTER_PORT']}"


@pytest.mark.long_on_executors
@pytest.mark.parametrize(
    "words", ["python train.py ${{inputs.out}} --lr 0.1", "python -m train ${{inputs.out}} --lr 0.1"]
)
def test_commands_of_azure_run(words: str, anywhere: None, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(
        "import json, os, sys\nfrom pathlib import Path\n"
        "Path(sys.argv[1] + os.environ['RANK']).write_text(json.dumps(sys.argv[2:]))\n"
    )
    job = azureml.command(
        command=words,
        code=str(tmp_path / "src"),
        inputs={"out": str(tmp_path / "rank-")},
        distribution=azureml.MpiDistribution(process_count_per_instance=2),
        display_name="from Azure",
    )
    assert azureml.run(job) is None
    assert [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)] == [["--lr", "0.1"]] * 2


@pytest.mark.long_on_executors
def test_a_trial_of_azure(on_cpus: None) -> None:
    assert azureml.run(who, distribution=azureml.PyTorchDistribution(process_count_per_instance=8))[1] == 2


SCRIPT = """
from distributor.compat.databricks.serverless_gpu import distributed

@distributed(gpus=2)
def train():
    import time
    print("training", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    train.distributed()
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_of_a_decorated_function(tmp_path: Path) -> None:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with programs.start(tmp_path, SCRIPT, env={trial.VARIABLE: "2"}, **streams) as driver:
        assert driver.stdout is not None
        for _ in range(2):
            assert "training" in driver.stdout.readline()
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=watch.DEADLINE)
    assert driver.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert "ranks 0-1 in" in errors  # where they were
