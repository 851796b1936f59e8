"""MLflow's own server, with SQLite behind it: one run across kills and resumes, and a server that is down."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import watch
from sessions import Make

from distributor import ConfigurationError, runs, runtime, sweep, uniform
from distributor.callbacks import MLflow
from distributor.tracking import mlflow as module, spool as spools

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # MLflow's own, to its makers
pytest.importorskip("optuna")
mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no server")


ROOT = Path(__file__).parents[1]


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    address = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    server = subprocess.Popen([sys.executable, "-m", "mlflow", "server", *address, *stores], start_new_session=True)
    watch.until(lambda: answers(port))
    return server


def stop_server(server: subprocess.Popen[bytes]) -> None:
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def answers(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    started = start_server(tmp_path_factory.mktemp("mlflow"), port)
    yield f"http://127.0.0.1:{port}"
    stop_server(started)


@pytest.fixture(params=["server", "sqlite"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A server, and none."""
    if request.param == "server":
        return str(request.getfixturevalue("server"))
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTOR_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)  # without a server, MLflow puts files below the current folder


def environ() -> dict[str, str]:
    """The environment but for what MLflow itself notes there."""
    return {name: value for name, value in os.environ.items() if not name.startswith("_MLFLOW_")}


def client(uri: str) -> Any:
    return mlflow.MlflowClient(uri)


def found(uri: str, experiment: str) -> list[Any]:
    """The runs of an experiment, the oldest first."""
    known = client(uri).get_experiment_by_name(experiment)
    if known is None:
        return []
    return list(client(uri).search_runs([known.experiment_id], order_by=["attributes.start_time ASC"]))


def history(uri: str, run: Any, name: str) -> list[tuple[int, float]]:
    return sorted((each.step, each.value) for each in client(uri).get_metric_history(run.info.run_id, name))


def train(epochs: int, lr: float = 0.1, kills: int = 0, token: str = "") -> None:
    """Report each step; be killed at every third one. A killed attempt's last step is repeated, with another value."""
    rank, attempt = int(os.environ["RANK"]), runtime.attempt()
    print("attempt", attempt)  # into a file of log_dir
    for step in range((runtime.load_checkpoint({"step": 0}) or 0) + 1, epochs + 1):
        runtime.report({"loss": attempt + 100 * rank, "odd*name": 1.0}, step=step)
        if step % 3 and step < epochs:
            runtime.save_checkpoint({"step": step}, step=step)
        elif attempt < kills:
            os.kill(os.getpid(), signal.SIGKILL)
    runtime.report(final=0.5)


def test_one_run_across_kills_and_resumes(make_local: Make, uri: str, tmp_path: Path) -> None:
    before = environ()
    experiment = f"/kills-{uri.partition(':')[0]}"
    tracker = MLflow(experiment, uri)
    options: Any = {"checkpoints": tmp_path / "kept", "max_restarts": 5, "callbacks": [tracker], "name": "digits"}
    run = make_local(2, log_dir=tmp_path / "logs", **options).submit(train, 9, kills=2, token="hush")
    run.result(watch.DEADLINE)
    (first,) = found(uri, experiment)
    steps = history(uri, first, "loss")
    assert [step for step, _ in steps] == list(range(1, 10))
    assert all(value < 100 for _, value in steps)
    assert first.data.params == {"epochs": "9", "lr": "0.1", "kills": "2"}
    assert first.info.status == "FINISHED" and first.info.run_name == "digits"
    assert first.data.metrics["final"] == 0.5 and first.data.metrics["odd_name"] == 1.0
    tags = first.data.tags
    assert tags["distributor.run"] == run.id and "% of " in tags["distributor.goodput"]
    assert tags["distributor.placement"] == str(run.placement)
    assert "killed by SIGKILL" in tags["distributor.attempt.0"]
    assert tags["distributor.checkpoint"].startswith(str(tmp_path / "kept"))
    assert {"distributor.version.torch", "mlflow.source.name"} <= tags.keys()
    assert [each.path for each in client(uri).list_artifacts(first.info.run_id)] == ["logs"]

    make_local(2, **{**options, "callbacks": [MLflow(experiment, uri)]}).run(train, 12, kills=0, lr=0.2)
    (again,) = found(uri, experiment)
    assert again.info.run_id == first.info.run_id
    assert [step for step, _ in history(uri, again, "loss")] == list(range(1, 13))
    assert history(uri, again, "loss")[:9] == steps
    assert again.data.params["epochs"] == "9"
    assert (again.data.tags["changed.epochs"], again.data.tags["changed.lr"]) == ("12", "0.2")

    make_local(1, resume="never", **options).run(train, 2)
    assert len(found(uri, experiment)) == 2
    assert environ() == before
    assert not list((tmp_path / "runs" / ".mlflow").rglob("*.spool"))


DRIVER = """
import sys
sys.path[:0] = sys.argv[4:]
from pathlib import Path
from distributor import Distributor
from distributor.callbacks import MLflow
from test_mlflow import wait_at

uri, experiment, folder = sys.argv[1:4]
Distributor(1, True, False, name="killed", checkpoints=folder + "/kept", callbacks=[MLflow(experiment, uri)]).run(
    wait_at, 5, folder + "/go", 5
)
"""


def wait_at(epochs: int, go: str, step_to_wait: int) -> None:
    import time

    for step in range((runtime.load_checkpoint({"step": 0}) or 0) + 1, epochs + 1):
        runtime.report(step=step, loss=1.0 / step)
        runtime.save_checkpoint({"step": step}, step=step)
    while step_to_wait == epochs and not os.path.exists(go):
        time.sleep(0.05)


def test_a_driver_that_was_killed_comes_back_to_its_run(make_local: Make, server: str, tmp_path: Path) -> None:
    places = [str(Path(__file__).parent), str(Path(__file__).parent / "support")]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, server, "/back", str(tmp_path), *places], cwd=ROOT)
    watch.until(lambda: any(run.step == 5 for run in runs()))
    watch.until(lambda: [run.data.metrics.get("loss") for run in found(server, "/back")] == [0.2])
    driver.kill()
    driver.wait()
    (tmp_path / "go").touch()
    tracker = MLflow("/back", server)
    make_local(1, name="killed", checkpoints=tmp_path / "kept", callbacks=[tracker]).run(
        wait_at, 8, str(tmp_path / "go"), 5
    )
    (run,) = found(server, "/back")
    assert [step for step, _ in history(server, run, "loss")] == list(range(1, 9))
    assert run.info.status == "FINISHED"


def report(x: float = 0.5) -> None:
    for step in range(3):
        runtime.report(step=step, loss=x + step)


def test_a_server_that_is_down_delays_nothing_and_gets_all_later(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    port = free_port()
    uri, ends = f"http://127.0.0.1:{port}", []

    class After:
        def on_end(self, run: Any) -> None:
            ends.append(run.status.value)

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    first = make_local(1, callbacks=[MLflow("/down", uri), After()]).submit(report)
    first.result(watch.DEADLINE)
    assert ends == ["succeeded"]
    (path,) = (tmp_path / "runs" / ".mlflow").rglob("*.spool")
    assert f"MLflow at {uri} did not take all reports in 0.5 s: they lie in {path}" in caplog.text
    server = start_server(tmp_path / "server", port)
    try:
        monkeypatch.setattr(module, "_PATIENCE", watch.DEADLINE)
        second = make_local(1, callbacks=[MLflow("/down", uri)]).submit(report)
        second.result(watch.DEADLINE)
        assert [run.data.tags["distributor.run"] for run in found(uri, "/down")] == [first.id, second.id]
        for run in found(uri, "/down"):
            assert history(uri, run, "loss") == [(0, 0.5), (1, 1.5), (2, 2.5)]
            assert run.info.status == "FINISHED"
    finally:
        stop_server(server)
    assert not list((tmp_path / "runs" / ".mlflow").rglob("*.spool"))


def report_refused() -> None:
    runtime.report({"x" * 300: 1.0, "a*b": 2.0, "a+b": 3.0, "good": float("inf")}, step=1)
    runtime.report(good=2.0, step=2)


def test_names_that_are_refused_are_renamed(make_local: Make, server: str, caplog: pytest.LogCaptureFixture) -> None:
    make_local(1, callbacks=[MLflow("/names", server)]).run(report_refused)
    (run,) = found(server, "/names")
    assert run.data.metrics["good"] == 2.0 and run.data.metrics["a_b"] == 2.0
    assert sorted(run.data.metrics.values()) == [1.0, 2.0, 2.0, 3.0]
    assert caplog.text.count("does not take the name 'a*b', which is 'a_b' there") == 1


def test_a_study_is_the_parent_of_its_trials(make_local: Make, server: str) -> None:
    distributor = make_local(1, callbacks=[MLflow("/study", server)])
    study = sweep(distributor, report, {"x": uniform(0, 1)}, metric=("loss", "min"), trials=3, name="search", at_once=2)
    (parent,) = [run for run in found(server, "/study") if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in found(server, "/study") if run.info.run_id != parent.info.run_id]
    assert parent.info.run_name == "search" and parent.info.status == "FINISHED"
    assert study.best is not None and parent.data.metrics["loss"] == pytest.approx(study.best.value)
    assert {run.info.run_name for run in children} == {"search/0", "search/1", "search/2"}
    for run in children:
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id and run.info.status == "FINISHED"
        assert len(history(server, run, "loss")) == 3


def test_metrics_above_the_bound_are_thinned(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spools, "BOUND", 2000)
    begin = spools.RunBegun("a", None, "a", 0.0, "/", "train")
    spool = spools.Spool.create(tmp_path / "spool", begin)
    for step in range(10_000):
        spool.append(spools.Values(step, 0.0, {"loss": 1.0}))
    spool.append(spools.RunEnded("FINISHED", 1.0))
    assert spool.size < 6000 and spool.is_whole
    assert caplog.text.count(f"more than 2.0 KiB wait in {spool.path} to be sent") == 1


def test_mlflow_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.tracking.mlflow.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'distributor\[mlflow\]'"):
        MLflow("/x")
