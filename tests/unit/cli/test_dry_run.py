"""What a dry run prints, and that it starts and creates nothing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from distributor.cli import command


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    return str(path)


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the session of another test."""
    monkeypatch.setattr("distributor.schedulers.spark.sessions.active_session", lambda: None)


def test_a_dry_run_shows_each_ranks_command_and_environment(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    env = ["--env", "A=b c", "--env", "API_KEY=geheim", "--env", "DB_PASSWD=geheim"]
    run = ["run", "-n", "3", "--local", "--no-gpu", *env, "--dry-run"]
    assert command.call([*run, script, "--lr", "0.1", "a b"]) == 0
    out = capsys.readouterr().out
    assert f"run           script {script}\n" in out
    assert "on            this machine: 3 ranks, on CPUs\n" in out
    assert ": ranks 0-2\n" in out
    assert (
        f"command       python {script} --lr 0.1 'a b'   "
        "(in each rank, started by torch's elastic agent; launch path: torchrun)"
    ) in out
    for variable in (
        "A='b c'",
        "API_KEY=***",
        "DB_PASSWD=***",
        "CUDA_VISIBLE_DEVICES=''",
        "RANK=0",
        "WORLD_SIZE=3",
        "MASTER_PORT=$PORT",
    ):
        assert f"\n  {variable}\n" in out
    assert "geheim" not in out


@pytest.mark.usefixtures("no_session")
def test_a_dry_run_on_spark_starts_no_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributor.schedulers.spark.sessions.create", lambda *_: pytest.fail("a session"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    settings = ["--conf", "spark.hadoop.fs.s3a.secret.key=s3cr3t", "--conf", "spark.executor.cores=4"]
    run = ["run", "-n", "8", "--master", "spark://a:7077", *settings, "--working-dir", "."]
    assert command.call([*run, "--deepspeed", "ds.json", "--dry-run", "-m", "pkg.train", "--epochs", "3"]) == 0
    out = capsys.readouterr().out
    assert "on            Spark, master spark://a:7077: 8 ranks, with 1 GPU each, requested from Spark\n" in out
    assert "placement     by Spark, when the run starts\n" in out
    assert (
        "command       python -m pkg.train --epochs 3 --deepspeed --deepspeed_config $RUN_FOLDER/deepspeed.json   "
        "(in each rank, started by torch's elastic agent; launch path: deepspeed)\n"
    ) in out
    assert f"{tmp_path} (" in out
    assert '"gradient_accumulation_steps": 1' in out
    for variable in (
        "MASTER_ADDR=$MASTER",
        "CUDA_VISIBLE_DEVICES=$GPUS_OF_NODE",
        "OMP_NUM_THREADS=$CPUS_OF_TASK",
        "LOCAL_WORLD_SIZE=$RANKS_OF_NODE",
        "GROUP_WORLD_SIZE=$NODES",
        "NCCL_SOCKET_IFNAME==$INTERFACE",
    ):
        assert f"\n  {variable}\n" in out
    assert "\nValues that begin with $ are decided when the run starts.\n" in out
    told = "\nSpark's settings:\n  spark.executor.cores=4\n  spark.hadoop.fs.s3a.secret.key=***\n"
    assert out.endswith(told)


@pytest.mark.usefixtures("no_session")
def test_a_dry_run_on_spark_shows_what_is_known_in_advance(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "77")  # the driver's own, which executors do not see
    run = ["run", "-n", "8", "--master", "yarn", "--no-gpu", "--cpus-per-process", "4", "--dry-run"]
    assert command.call([*run, script]) == 0
    out = capsys.readouterr().out
    assert "8 ranks, on CPUs\n" in out
    assert "\n  CUDA_VISIBLE_DEVICES=''\n" in out
    assert "\n  OMP_NUM_THREADS=4\n" in out


@pytest.mark.parametrize(
    ("launch", "gpu", "variables"),
    [
        ("mpi-env", "--no-gpu", ["AZ_BATCH_MASTER_NODE=$MASTER:$PORT", "OMPI_COMM_WORLD_LOCAL_SIZE=$RANKS_OF_NODE"]),
        ("deepspeed", "--no-gpu", ["CROSS_SIZE=$NODES", "LOCAL_SIZE=$RANKS_OF_NODE"]),
        ("tensorflow", "--use-gpu", ["CUDA_VISIBLE_DEVICES=$GPUS_OF_RANK"]),
    ],
)
@pytest.mark.usefixtures("no_session")
def test_a_dry_run_on_spark_leaves_open_what_each_launch_path_learns_at_the_start(
    launch: str, gpu: str, variables: list[str], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.call(["run", "-n", "4", "--master", "yarn", gpu, "--launch", launch, "--dry-run", script]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [variable for variable in variables if f"  {variable}" not in lines] == []


def submitted(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under spark-submit, on a driver without GPUs."""
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setattr("distributor.schedulers.spark.sessions.submitted_master", lambda: master)
    monkeypatch.setattr("distributor.machine.devices.local_gpus", lambda *_: [])


@pytest.mark.parametrize("gpu", ["--use-gpu", "--no-gpu"])
@pytest.mark.parametrize("master", ["yarn", "spark://a:7077", "local-cluster[2,1,1024]"])
@pytest.mark.usefixtures("no_session")
def test_a_dry_run_under_spark_submit_is_that_of_its_master(
    master: str, gpu: str, script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(master, monkeypatch)
    monkeypatch.setattr("secrets.token_hex", lambda _: "3f2a")
    run = ["run", "-n", "2", gpu, "--cpus-per-process", "1000", "--dry-run"]
    assert command.call([*run, "--master", master, script]) == 0
    expected = capsys.readouterr().out
    assert f"on            Spark, master {master}: 2 ranks, " in expected
    assert command.call([*run, script]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("master", ["local", "local[4]"])
@pytest.mark.usefixtures("no_session")
def test_a_dry_run_under_spark_submit_with_a_local_master(
    master: str, script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would train on this machine, without Spark."""
    submitted(master, monkeypatch)
    assert command.call(["run", "--no-gpu", "--dry-run", script]) == 0
    assert "on            the Spark session of spark-submit: 1 rank, on CPUs\n" in capsys.readouterr().out
    assert command.call(["run", "--dry-run", script]) == 2
    assert "this machine, the driver, has no visible GPU" in capsys.readouterr().err


@pytest.mark.usefixtures("no_session")
def test_a_dry_run_names_the_session_of_spark_remote(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted("local[4]", monkeypatch)
    monkeypatch.setenv("SPARK_REMOTE", "sc://host")
    assert command.call(["run", "--dry-run", script]) == 0
    told = (
        "on            the Spark session of the variable SPARK_REMOTE: 1 rank, with 1 GPU each, requested from Spark\n"
    )
    assert told in capsys.readouterr().out


@pytest.mark.usefixtures("no_session")
def test_a_token_in_a_masters_url_is_hidden(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "--no-gpu", "--master", "sc://host/;use_ssl=true;token=geheim"]
    assert command.call([*run, "--conf", "spark.remote=sc://a/;token=geheim==", "--dry-run", script]) == 0
    out = capsys.readouterr().out
    assert "Spark, master sc://host/;use_ssl=true;token=***: 1 rank" in out
    assert "spark.remote='sc://a/;token=***'" in out
    assert command.call([*run, "--local", script]) == 2
    assert "geheim" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("with_the_job", "told"),
    [(64 << 20, r", the files in {out} \(\d+ bytes\)\n"), (1, r", the files in {out} \(3\.0 KiB\)\n")],
    ids=["in the job", "from the driver"],
)
@pytest.mark.usefixtures("no_session")
def test_a_dry_run_lists_files_of_earlier_runs_that_are_sent(
    with_the_job: int,
    told: str,
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distributor.api.build.WITH_THE_JOB", with_the_job)
    out = tmp_path / "out"
    out.mkdir()
    run = ["run", "--master", "spark://a:7077", "--no-gpu", "--output-dir", str(out), "--dry-run", script]
    assert command.call(run) == 0
    assert str(out) not in capsys.readouterr().out  # no files yet
    (out / "losses.csv").write_bytes(bytes(3 << 10))
    assert command.call(run) == 0
    assert re.search(told.format(out=re.escape(str(out))), capsys.readouterr().out)


@pytest.mark.parametrize("where", [["--local"], ["--master", "spark://a:7077"]])
@pytest.mark.parametrize("begin", ["", "file://"])
@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ("new/out", None),
        (".", None),
        ("train.py", "train.py is not a folder"),
        ("train.py/out", "Not a directory"),
        ("x" * 256, "File name too long"),
    ],
)
@pytest.mark.usefixtures("no_session")
def test_a_dry_run_creates_no_output_dir(
    where: list[str], begin: str, inside: str, why: str | None, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(script).parent
    output_dir = f"{begin}{folder}/{inside}"
    given = ["--output-dir", output_dir, "--dry-run", script]
    assert command.call(["run", *where, "--no-gpu", *given]) == (0 if why is None else 2)
    assert list(folder.iterdir()) == [Path(script)]
    err = capsys.readouterr().err
    assert err == "" if why is None else f"--output-dir '{output_dir}' cannot be used: " in err and why in err


def test_a_dry_run_refuses_an_output_dir_of_others(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode: mode == os.R_OK)  # root may write everywhere
    folder = Path(script).parent
    given = ["--output-dir", str(folder / "new/out"), "--dry-run", script]
    assert command.call(["run", "--local", "--no-gpu", *given]) == 2
    assert f"new/out' cannot be used: this user may not write to {folder}\n" in capsys.readouterr().err


def test_a_dry_run_with_a_range_of_ranks(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.call(["run", "-n", "2:4", "--local", "--no-gpu", "--dry-run", script]) == 0
    assert "this machine: 2 to 4 ranks, on CPUs" in capsys.readouterr().out


def test_a_dry_run_refuses_a_wrong_request(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.call(["run", "--local", "--no-gpu", "--dry-run", "--cpus-per-process", "1000", script]) == 2
    assert "--cpus-per-process asks for 1,000 CPUs" in capsys.readouterr().err
