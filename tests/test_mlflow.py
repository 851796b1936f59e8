"""MLflow's own server, with SQLite behind it: one run across kills and resumes, and a server that is down."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trainings
import watch
from sessions import Make

from distributor import Checkpoints, ConfigurationError, Distributor, runs, runtime, sweep, uniform
from distributor.callbacks import MLflow
from distributor.tracking import mlflow as module, spool as spools
from distributor.tracking.mlflow_sender import Server, SpoolDelivery
from distributor.tracking.spool import RunBegun

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # MLflow's own, to its makers
os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # a server that is killed leaves their stores in /dev/shm
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


@pytest.fixture(params=[pytest.param("server", marks=pytest.mark.long), "sqlite"])
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


def all_has_been_sent() -> None:
    """Waits for what sends reports: while a server is down, its pauses are taken from ``random``."""
    watch.until(lambda: all(thread.name != "distributor-mlflow" for thread in threading.enumerate()))


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


@pytest.mark.long
def test_a_request_that_is_answered_late_takes_back_no_end(
    make_local: Make, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reports of a run stay its callback's until the request fails: no other callback sends them beside it."""
    asked, answered, real = threading.Event(), threading.Event(), Server.run_of

    def run_of(self: Server, begin: RunBegun) -> tuple[str, bool]:
        asked.set()
        assert answered.wait(watch.DEADLINE)
        return real(self, begin)

    monkeypatch.setattr(Server, "run_of", run_of)
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    first = make_local(1, callbacks=[MLflow("/late", server)]).submit(report)
    first.result(watch.DEADLINE)
    assert asked.wait(watch.DEADLINE)
    monkeypatch.setattr(Server, "run_of", real)
    monkeypatch.setattr(module, "_PATIENCE", watch.DEADLINE)
    second = make_local(1, callbacks=[MLflow("/late", server)]).submit(report)
    second.result(watch.DEADLINE)
    assert [run.data.tags["distributor.run"] for run in found(server, "/late")] == [second.id]
    answered.set()
    watch.until(lambda: not list((tmp_path / "runs" / ".mlflow").rglob("*.spool")))
    assert [run.info.status for run in found(server, "/late")] == ["FINISHED"] * 2


def report_refused() -> None:
    runtime.report({"x" * 300: 1.0, "a*b": 2.0, "a+b": 3.0, "good": float("inf")}, step=1)
    runtime.report(good=2.0, step=2)


def take(path: Path, separator: str) -> None:
    pass


@pytest.mark.long
def test_texts_that_databases_refuse_are_rewritten(make_local: Make, uri: str) -> None:
    experiment = f"/texts-{uri.partition(':')[0]}"
    make_local(1, callbacks=[MLflow(experiment, uri)]).run(take, Path(os.fsdecode(b"\xff")), "\0")
    (run,) = found(uri, experiment)
    assert run.data.params == {"path": r"\udcff", "separator": r"\0"}
    assert run.info.status == "FINISHED"


@pytest.mark.long
def test_the_experiment_is_the_one_that_mlflow_has(
    make_local: Make, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", client(server).create_experiment("/set"))  # as mlflow.set_experiment
    for tracker in (MLflow(), MLflow(tracking_uri=server), MLflow("/other"), MLflow(tracking_uri="sqlite:///a.db")):
        make_local(1, callbacks=[tracker]).run(report)
    assert len(found(server, "/set")) == 2
    assert len(found(server, "/other")) == len(found("sqlite:///a.db", "Default")) == 1


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


@pytest.mark.parametrize("end", ["raises", "is killed"])
def test_a_study_that_ends_early_says_so(make_local: Make, server: str, end: str) -> None:
    """Its parent run is there from the first trial on."""
    experiment, space = f"/early {end}", {"x": [0.0], "api_key": ["hush"]}
    code = (
        "import os, sys\nfrom distributor import Distributor, sweep\nfrom distributor.callbacks import MLflow\n"
        "def train(x, api_key):\n    from distributor import runtime\n    runtime.report(loss=x)\n"
        f"    if {end == 'raises'}:\n        raise ValueError('no')\n"
        "class Kill:\n    def on_end(self, run):\n"
        f"        if {end != 'raises'} and run.trial.number == 1:\n            os.kill(os.getpid(), 9)\n"
        f"callbacks = [MLflow({experiment!r}, {server!r}), Kill()]\n"
        "distributor = Distributor(1, local_mode=True, use_gpu=False, progress=False, callbacks=callbacks)\n"
        f"sweep(distributor, train, {space!r}, metric=('loss', 'min'), trials=5, at_once=1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == (1 if end == "raises" else -9), ended.stderr
    if end != "raises":
        make_local(1, callbacks=[MLflow(experiment, server)]).run(report)
    everything = found(server, experiment)
    (parent,) = [run for run in everything if run.info.run_name.startswith("sweep-") and "/" not in run.info.run_name]
    assert parent.info.status == ("FAILED" if end == "raises" else "KILLED")
    assert "ValueError: no" in parent.data.tags.get("distributor.error", "ValueError: no")
    assert all(run.info.end_time for run in everything)
    assert "hush" not in str([run.data for run in everything])


def test_runs_that_start_at_once_all_join_theirs(make_local: Make, server: str) -> None:
    distributor = make_local(1, env={"MLFLOW_TRACKING_URI": server}, callbacks=[MLflow("/at once", server)])
    started = [distributor.submit(report) for _ in range(3)]
    for run in started:
        run.result(watch.DEADLINE)
    tracked = {run._current.tracked for run in started}
    assert tracked == {run.info.run_id for run in found(server, "/at once")}


def test_an_experiment_that_was_deleted_delays_nothing(
    make_local: Make, server: str, caplog: pytest.LogCaptureFixture
) -> None:
    client(server).delete_experiment(client(server).create_experiment("/deleted"))
    tracker = MLflow("/deleted", server)
    make_local(1, callbacks=[tracker]).run(report)
    assert "refuses runs; their reports stay in" in caplog.text
    assert "does not answer" not in caplog.text and "did not take" not in caplog.text
    assert len(list(tracker._folder.glob("*.spool"))) == 1


def test_values_without_a_step_are_sent_once_although_the_driver_was_killed_before_it_noted_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    spool = spools.Spool.create(tmp_path, RunBegun("a", None, "a", 0.0, "/", "train"))
    for value in (0.25, 0.5):
        spool.append(spools.Values(None, 1.0 + value, {"final": value}))
    monkeypatch.setattr(spool, "acknowledge", lambda end: None)
    SpoolDelivery(spool).send(client(uri), Server(client(uri), uri, "/again"))
    spool.release()
    (left,) = spools.Spool.left_in(tmp_path)
    delivery = SpoolDelivery(left, is_left=True)
    while delivery.send(client(uri), Server(client(uri), uri, "/again")):
        pass
    assert history(uri, found(uri, "/again")[0], "final") == [(0, 0.25), (1, 0.5)]


def diverge(x: float) -> None:
    runtime.report(loss=float("inf"))


@pytest.mark.long
def test_the_best_value_of_a_study_may_be_infinite(make_local: Make, server: str) -> None:
    distributor = make_local(1, callbacks=[MLflow("/infinite", server)])
    sweep(distributor, diverge, {"x": [0.0]}, metric=("loss", "min"), trials=1, name="search")
    (parent,) = [run for run in found(server, "/infinite") if "mlflow.parentRunId" not in run.data.tags]
    assert parent.data.metrics["loss"] > 1e300


@pytest.mark.long
def test_the_end_of_a_study_leaves_other_runs_to_themselves(make_local: Make, server: str, tmp_path: Path) -> None:
    tracker = MLflow("/shared", server)
    other = make_local(1, callbacks=[tracker]).submit(wait_for, str(tmp_path / "go"))
    watch.until(lambda: bool(runs := found(server, "/shared")) and len(history(server, runs[0], "loss")) == 1)
    space: Any = {"x": uniform(0, 1)}
    sweep(make_local(1, callbacks=[tracker]), report, space, metric=("loss", "min"), trials=1, name="search")
    (tmp_path / "go").touch()
    other.result(watch.DEADLINE)
    of_other = [run for run in found(server, "/shared") if run.data.tags.get("distributor.run") == other.id]
    assert [run.info.status for run in of_other] == ["FINISHED"]
    assert not list((tmp_path / "runs" / ".mlflow").rglob("*.spool"))


def autolog_trial(x: float) -> None:
    autolog(1)


@pytest.mark.long
@pytest.mark.usefixtures("_patient")
def test_rank_0_logs_to_the_run_of_its_trial(make_local: Make, server: str) -> None:
    distributor = make_local(1, env={"MLFLOW_TRACKING_URI": server}, callbacks=[MLflow("/joining", server)])
    sweep(distributor, autolog_trial, {"x": uniform(0, 1)}, metric=("loss", "min"), trials=2, name="search", at_once=2)
    children = [run for run in found(server, "/joining") if "mlflow.parentRunId" in run.data.tags]
    assert sorted(run.info.run_name for run in children) == ["search/0", "search/1"]
    assert all(run.data.params["fit_intercept"] == "True" for run in children)


@pytest.mark.long
def test_what_an_earlier_driver_left_for_no_place_delays_nobody(
    make_local: Make, server: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MLflow("/left", server)
    begin = RunBegun("a", "nowhere://bucket/kept", "a", 0.0, "/", "train")
    spools.Spool.create(tracker._folder, begin).release()
    (left,) = tracker._folder.glob("*.spool")
    run = make_local(1, callbacks=[tracker]).submit(report)
    run.result(watch.DEADLINE)
    (ours,) = found(server, "/left")
    assert ours.info.status == "FINISHED" and len(history(server, ours, "loss")) == 3
    assert left.exists()
    assert f"{left}, of an earlier driver, is not sent: " in caplog.text
    assert "does not answer" not in caplog.text and "did not take" not in caplog.text


@pytest.mark.long
def test_a_driver_that_was_killed_ended_when_it_last_wrote(make_local: Make, server: str) -> None:
    tracker = MLflow("/ended", server)
    left = spools.Spool.create(tracker._folder, RunBegun("a", None, "a", 500.0, "/", "train"))
    left.append(spools.Values(1, 900.0, {"loss": 1.0}))
    left.release()
    os.utime(left.path, (1000.0, 1000.0))
    make_local(1, callbacks=[tracker]).run(report)
    killed, _ = found(server, "/ended")
    assert (killed.info.status, killed.info.end_time) == ("KILLED", 1_000_000)


@pytest.mark.long
def test_what_is_left_of_a_run_that_has_gone_on_elsewhere_takes_back_nothing(
    make_local: Make, server: str, tmp_path: Path
) -> None:
    """The first driver was killed, and another machine has gone on; then the first machine sends what is left there."""
    tracker = MLflow("/gone-on", server)
    run = make_local(1, callbacks=[tracker], name="digits", checkpoints=tmp_path / "kept").submit(report)
    run.result(watch.DEADLINE)
    begin = RunBegun("a", run.training_folder, "digits", run.submitted - 60, "/", "train")
    left = spools.Spool.create(tracker._folder, begin)
    for entry in (
        spools.Params({"x": "9"}),
        spools.Tags({"distributor.error": "lost"}),
        spools.Values(9, 0.0, {"y": 1}),
    ):
        left.append(entry)
    left.release()
    before = found(server, "/gone-on")[0]
    make_local(1, callbacks=[tracker]).run(report)
    after = next(each for each in found(server, "/gone-on") if each.info.run_id == before.info.run_id)
    assert (after.info.status, after.info.end_time) == ("FINISHED", before.info.end_time)
    assert after.data.tags == before.data.tags and after.data.params == before.data.params
    assert history(server, after, "y") == [(9, 1.0)]
    assert not list(tracker._folder.glob("*.spool"))


def divide(by: int) -> float:
    return 1 / by


@pytest.mark.long
def test_a_training_that_goes_on_has_no_error_of_before(make_local: Make, server: str, tmp_path: Path) -> None:
    distributor = make_local(1, name="a", checkpoints=tmp_path / "kept", callbacks=[MLflow("/errors", server)])
    distributor.submit(divide, 0).wait(watch.DEADLINE)
    (failed,) = found(server, "/errors")
    assert "ZeroDivisionError" in failed.data.tags["distributor.error"]
    distributor.run(divide, 1)
    (run,) = found(server, "/errors")
    assert run.info.status == "FINISHED" and "distributor.error" not in run.data.tags


def test_what_is_sent_of_a_trial_takes_no_memory(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    delivery = SpoolDelivery(spools.Spool.create(tmp_path, RunBegun("a", None, "a", 0.0, "/", "train")))
    delivery.spool.append(spools.Values(1, 0.0, {"loss": 1.0}))
    delivery.spool.append(spools.RunEnded("FINISHED", 1.0))
    while delivery.send(client(uri), Server(client(uri), uri, "/memory")):
        pass
    assert delivery.done.is_set() and not delivery._steps
    assert history(uri, found(uri, "/memory")[0], "loss") == [(1, 1.0)]


def report_without_step() -> None:
    runtime.report(final=0.5)


@pytest.mark.long
def test_a_value_without_a_step_is_sent_once_although_the_end_is_refused_at_first(
    make_local: Make, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = mlflow.MlflowClient.set_terminated, list[str]()

    def set_terminated(self: Any, run: str, *arguments: Any) -> None:
        if not refused:
            refused.append(run)
            raise OSError("no route")
        real(self, run, *arguments)

    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", set_terminated)
    make_local(1, callbacks=[MLflow("/once", server)]).run(report_without_step)
    (run,) = found(server, "/once")
    assert refused == [run.info.run_id] and run.info.status == "FINISHED"
    assert history(server, run, "final") == [(0, 0.5)]


def test_a_password_is_shown_and_kept_nowhere(
    make_local: Make, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = MLflow("/user", server.replace("://", "://me:hush@"))
    make_local(1, callbacks=[tracker], name="digits", checkpoints=tmp_path / "kept").run(report)
    assert found(server, "/user")[0].info.status == "FINISHED"
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    down = MLflow("/user", f"http://me:hush@127.0.0.1:{free_port()}")
    make_local(1, callbacks=[down]).run(report)
    watch.until(lambda: "does not answer" in caplog.text)
    assert "did not take all reports" in caplog.text
    assert "hush" not in caplog.text + repr(tracker) + repr(down)
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]
    assert kept == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("uri", "is_same"),
    [("sqlite:///mlflow.db", False), (None, False), ("sqlite:////tmp/a.db", True), ("http://host:5000", True)],
)
def test_what_is_left_goes_to_the_same_place_whatever_the_current_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str | None, is_same: bool
) -> None:
    one = MLflow("/here", uri)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert (MLflow("/here", uri)._folder == one._folder) is is_same


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


def wait_for(go: str) -> None:
    import time

    runtime.report(loss=1.0, step=1)
    while not os.path.exists(go):
        time.sleep(0.05)


@pytest.mark.long
def test_the_load_of_nodes_has_names_of_mlflow(
    make_local: Make, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.system_metrics.metrics import cpu_monitor, disk_monitor, network_monitor

    monkeypatch.setattr("distributor.api.build.SAMPLE_EVERY", 0.1)
    names = set()
    for monitor in (cpu_monitor.CPUMonitor(), disk_monitor.DiskMonitor(), network_monitor.NetworkMonitor()):
        monitor.collect_metrics()
        names |= {f"system/0/{name}" for name in monitor.aggregate_metrics()}

    def has_two_samples() -> bool:
        runs = found(server, "/load")
        return bool(runs) and len(history(server, runs[0], "system/0/cpu_utilization_percentage")) > 1

    run = make_local(1, callbacks=[MLflow("/load", server, system_metrics=True)]).submit(wait_for, str(tmp_path / "go"))
    watch.until(has_two_samples)
    (tmp_path / "go").touch()
    run.result(watch.DEADLINE)
    (tracked,) = found(server, "/load")
    assert {name for name in tracked.data.metrics if not name.startswith("system/0/gpu_")} == {*names, "loss"}
    steps = [step for step, _ in history(server, tracked, "system/0/cpu_utilization_percentage")]
    assert steps == list(range(len(steps)))
    assert run.metrics.names == ["loss"]

    make_local(1, callbacks=[MLflow("/no-load", server)]).run(wait_for, str(tmp_path / "go"))
    assert found(server, "/no-load")[0].data.metrics == {"loss": 1.0}


@pytest.mark.long
@pytest.mark.spark
def test_each_node_has_its_load(
    two_executors: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributor.api.build.SAMPLE_EVERY", 0.1)
    tracker = MLflow("/nodes", server, system_metrics=True)
    make = Distributor(2, False, False, max_processes_per_node=1, callbacks=[tracker])
    run = make.submit(wait_for, str(tmp_path / "go"))

    def have_two_samples() -> bool:
        names = [f"system/{node}/system_memory_usage_percentage" for node in (0, 1)]
        return bool(runs := found(server, "/nodes")) and all(len(history(server, runs[0], name)) > 1 for name in names)

    watch.until(have_two_samples)
    (tmp_path / "go").touch()
    run.result(watch.DEADLINE)
    (tracked,) = found(server, "/nodes")
    assert {name.split("/")[1] for name in tracked.data.metrics if name.startswith("system/")} == {"0", "1"}


def autolog(steps: int) -> None:
    import mlflow
    import sklearn.linear_model

    mlflow.autolog(silent=True, log_models=False)
    sklearn.linear_model.LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0])
    for step in range(steps):
        runtime.report(loss=1.0, step=step)


def autolog_into_own(steps: int) -> None:
    import mlflow

    with mlflow.start_run(run_name="own"):
        autolog(steps)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts wait as long as it takes a busy machine to make a run."""
    monkeypatch.setattr(module, "_START_PATIENCE", watch.DEADLINE)


@pytest.mark.long
def test_without_our_server_autologging_in_ranks_does_nothing(
    make_local: Make, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    env = {"MLFLOW_TRACKING_URI": other, "MLFLOW_EXPERIMENT_NAME": "/autologged"}
    make_local(1, env=env).run(autolog, 1)
    (own,) = found(other, "/autologged")
    assert own.data.params["fit_intercept"] == "True"  # without our callback, MLflow does as ever
    run = make_local(2, env=env, callbacks=[MLflow("/autologged", server)]).submit(autolog, 2)
    run.result(watch.DEADLINE)
    assert len(found(other, "/autologged")) == 1
    (tracked,) = found(server, "/autologged")
    assert tracked.data.tags["distributor.run"] == run.id and tracked.data.params == {"steps": "2"}
    assert len(history(server, tracked, "loss")) == 2
    assert caplog.text.count("mlflow.autolog() does nothing in ranks") == 1


def autolog_and_fail(folder: str, fails: bool) -> None:
    """Let rank 0 be killed once it has logged, then fail after an own run, then fail."""
    attempt = runtime.attempt()
    if attempt < 2:
        autolog(2)
    if os.environ["RANK"] == "0":
        if attempt == 1:
            autolog_into_own(0)
        Path(folder, f"logged-{attempt}").touch()
        watch.until(Path(folder, f"go-{attempt}").exists)
        if attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a failure of the training")


@pytest.mark.usefixtures("_patient")
def test_rank_0_logs_to_our_run_and_ends_it_never(
    make_local: Make, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = f"/joined-{uri.partition(':')[0]}"
    options: Any = {"env": {"MLFLOW_TRACKING_URI": uri}, "callbacks": [MLflow(experiment, uri)]}
    run = make_local(2, max_restarts=2, restart_on="any", **options).submit(autolog_and_fail, str(tmp_path), fails=True)
    for attempt in range(3):
        watch.until((tmp_path / f"logged-{attempt}").exists)
        ours = next(each for each in found(uri, experiment) if "distributor.run" in each.data.tags)
        assert ours.info.status == "RUNNING"
        assert ours.data.params["fit_intercept"] == "True"
        (tmp_path / f"go-{attempt}").touch()
    assert run.wait(watch.DEADLINE) and isinstance(run.error, Exception)
    assert "does nothing in ranks" not in caplog.text
    (ours,) = found(uri, experiment)
    assert ours.info.status == "FAILED"
    assert ours.info.run_name == run.id and ours.data.params["fails"] == "True"
    assert len(history(uri, ours, "loss")) == 2
    (own,) = found(uri, "Default")
    assert own.info.run_name == "own" and own.data.params["fit_intercept"] == "True" and own.info.status == "FINISHED"


def trained_by(kind: str, steps: int, folder: str) -> int:
    """Train with a Trainer that logs to MLflow; with Transformers' also with one that does not, at a later step."""
    import torch

    if kind == "transformers":
        sys.path.append(str(Path(__file__).parent / "support" / "stand_in"))  # after the real one
        import transformers  # type: ignore[import-untyped, unused-ignore]

        plain: Any = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "run_name": "another name"}
        for report_to, most, every in (("mlflow", steps, 1), ("none", steps + 1, steps + 1)):
            arguments = transformers.TrainingArguments(
                folder, report_to=report_to, max_steps=most, logging_steps=every, **plain
            )
            data = [{"x": torch.ones(1)}] * 8 * most
            transformers.Trainer(trainings.squared(), arguments, train_dataset=data).train()
    else:
        import mlflow
        import pytorch_lightning

        class Logged(pytorch_lightning.LightningModule):  # type: ignore[misc, unused-ignore]
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)

            def training_step(self, batch: Any, index: int) -> Any:
                loss = self.layer(batch).sum()
                self.log("loss", loss)
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), 0.01)

        mlflow.pytorch.autolog(log_models=False, checkpoint=False, log_every_n_step=1, log_every_n_epoch=steps + 1)
        loader = torch.utils.data.DataLoader(torch.ones(steps, 1))
        plain = {"accelerator": "cpu", "default_root_dir": folder, "logger": False, "log_every_n_steps": 1}
        pytorch_lightning.Trainer(max_steps=steps, enable_checkpointing=False, **plain).fit(Logged(), loader)
    runtime.report(step=1, explicit=0.5)
    if os.environ["RANK"] == "0":
        Path(folder, "logged").touch()
        watch.until(Path(folder, "go").exists)
    return watch.started_by()


@pytest.mark.long
@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_the_driver_leaves_to_rank_0_what_a_trainer_logs(
    kind: str, make_local: Make, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "lightning":
        pytest.importorskip("pytorch_lightning")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # which ranks inherit
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "/elsewhere")
    experiment = f"/{kind}-{uri.partition(':')[0]}"
    options: Any = {"callbacks": [MLflow(experiment)], "name": "digits", "checkpoints": tmp_path / "kept"}
    run = make_local(2, **options).submit(trained_by, kind, 3, str(tmp_path))
    watch.until((tmp_path / "logged").exists)
    (ours,) = found(uri, experiment)
    assert ours.info.status == "RUNNING"
    (tmp_path / "go").touch()
    warm = run.result(watch.DEADLINE)
    (ours,) = found(uri, experiment)
    assert ours.info.status == "FINISHED" and ours.info.run_name == "digits"
    assert found(uri, "/elsewhere") == []
    steps = [1, 2, 3] if kind == "lightning" else [1, 2, 3, 4]
    assert [step for step, _ in history(uri, ours, "loss")] == steps
    assert [row.step for row in run.metrics if "loss" in row.values and row.rank == 0] == steps
    assert history(uri, ours, "explicit") == [(1, 0.5)]

    assert make_local(2, **options).run(trained_by, kind, 5, str(tmp_path)) == warm != 0  # the id needs no other one
    (again,) = found(uri, experiment)
    assert again.info.run_id == ours.info.run_id and again.info.status == "FINISHED"


@pytest.mark.long
def test_a_server_that_is_down_delays_one_start_and_rank_0_joins_nothing(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_START_PATIENCE", 0.3)
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri, looks = f"http://127.0.0.1:{free_port()}", [0]
    asked = MLflow.run_for_ranks

    def counted(self: MLflow, run: Any, environ: Any, wanted: Any) -> str:
        def look() -> bool:
            looks[-1] += 1
            return bool(wanted())

        looks.append(0)
        return asked(self, run, environ, look)

    monkeypatch.setattr(MLflow, "run_for_ranks", counted)
    distributor = make_local(1, env={"MLFLOW_TRACKING_URI": uri}, callbacks=[MLflow("/x", uri)])
    for _ in range(2):
        distributor.run(autolog, 1)
    assert looks[1] > 0 and looks[2] == 0
    assert caplog.text.count("mlflow.autolog() does nothing in ranks") == 2
    all_has_been_sent()


def build() -> Any:
    import torch

    return torch.nn.Linear(2, 1, bias=False)


def build_branching() -> Any:
    """A module that torch.export refuses."""
    import torch

    class Branching(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) if float(x.sum()) > 0 else x[:, :1]

    return Branching(2, 1, bias=False)


def fit(x: float = 0.0, entry: str = "model", base: float = 0.0) -> str:
    """Save three checkpoints, whose weights are ``base`` and the step; the loss is lowest at step 2."""
    import torch

    module = build()
    done = runtime.load_checkpoint({entry: module}) or 0
    for step in range(done + 1, done + 4):
        torch.nn.init.constant_(module.weight, base + step)
        runtime.report(loss=abs(step - 2.0) + x, step=step)
        optimizer = torch.optim.Adam(module.parameters())
        runtime.save_checkpoint({entry: module, "optimizer": optimizer}, step=step, wait=True)
    return "fitted"


def versions(uri: str, name: str) -> list[Any]:
    """The versions of a registered model, the oldest first."""
    found = client(uri).search_model_versions(f"name='{name}'")
    return sorted(found, key=lambda version: int(version.version))


def registered(uri: str, version: Any, folder: Path) -> tuple[Path, Any]:
    """The folder of a version, and what MLflow says of it."""
    folder.mkdir()
    path = client(uri).download_artifacts(version.run_id, "model", str(folder))
    return Path(path), mlflow.models.Model.load(path)


def test_each_run_registers_its_best_checkpoint(make_local: Make, uri: str, tmp_path: Path) -> None:
    import numpy
    import torch

    all_has_been_sent()
    before, name, states = environ(), f"best-{uri.partition(':')[0]}", random.getstate()
    tracker = MLflow("/registers", uri, register=name, model=build, example=torch.ones(2, 2))
    places = [Checkpoints(str(tmp_path / "first"), best=("loss", "min")), Checkpoints(str(tmp_path / "second"))]
    for place in places:
        make_local(1, checkpoints=place, callbacks=[tracker]).run(fit)
    best, last = versions(uri, name)
    assert (str(best.version), str(last.version)) == ("1", "2") and best.run_id != last.run_id
    for version, step in ((best, 2), (last, 3)):
        path, described = registered(uri, version, tmp_path / str(step))
        assert (path / "data" / "model.pt2").is_file() or mlflow.__version__ < "3", "MLflow 2 only pickles"
        assert described.signature.inputs.inputs[0].shape == (-1, 2)
        assert described.signature.outputs.inputs[0].shape == (-1, 1)
        output = mlflow.pyfunc.load_model(str(path)).predict(numpy.ones((3, 2), "float32"))
        assert output.tolist() == [[2.0 * step]] * 3
        tags = client(uri).get_run(version.run_id).data.tags
        assert tags["distributor.registered"].startswith(f"{name} {version.version}, of {tmp_path}/")
    assert environ() == before and random.getstate() == states


@pytest.mark.long
def test_a_training_that_goes_on_leaves_earlier_versions_as_they_are(
    make_local: Make, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    name = f"goes-on-{uri.partition(':')[0]}"
    tracker = MLflow("/goes-on", uri, register=name, model=build)
    for base in (0.0, 10.0):
        make_local(1, name="digits", checkpoints=tmp_path / "kept", callbacks=[tracker]).run(fit, base=base)
    first, second = versions(uri, name)
    assert first.run_id == second.run_id
    for version, weight in ((first, 3.0), (second, 16.0)):
        folder = tmp_path / str(version.version)
        folder.mkdir()
        path = client(uri).download_artifacts(version.run_id, version.source.rpartition("/")[2], str(folder))
        assert mlflow.pytorch.load_model(path).weight.tolist() == [[weight, weight]]


@pytest.mark.long
def test_what_does_not_export_is_pickled_whatever_its_entry(
    make_local: Make, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    tracker = MLflow("/pickled", server, register="pickled", model=build_branching, example=torch.ones(2, 2))
    make_local(1, checkpoints=tmp_path / "kept", callbacks=[tracker]).run(fit, entry="net")
    (version,) = versions(server, "pickled")
    path, _ = registered(server, version, tmp_path / "model")
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    assert mlflow.pytorch.load_model(str(path)).weight.tolist() == [[3.0, 3.0]]
    assert caplog.text.count("MLflow: the model pickled does not export, so it is pickled: ") == 1


@pytest.mark.long
def test_checkpoints_that_the_driver_cannot_read_are_registered_later(
    make_local: Make, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, away = tmp_path / "kept", tmp_path / "away"

    class Unmount:
        def on_end(self, run: Any) -> None:
            shutil.move(kept, away)

    tracker = MLflow("/later", server, register="later", model=build)
    place = Checkpoints(str(kept), best=("loss", "min"))
    assert make_local(1, checkpoints=place, callbacks=[Unmount(), tracker]).run(fit) == "fitted"
    assert versions(server, "later") == []
    _, _, call = caplog.text.partition("To register it later, where the checkpoints can be read: ")
    call = call.partition("\n")[0]
    assert call.startswith(f"MLflow('/later', {server!r}, register='later', model=build).register_model(")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.move(away, kept)
    assert eval(call) == "1"
    (version,) = versions(server, "later")
    assert version.run_id == found(server, "/later")[0].info.run_id


@pytest.mark.long
def test_a_sweep_registers_its_best_alone(make_local: Make, server: str, tmp_path: Path) -> None:
    tracker = MLflow("/swept", server, register="swept", model=build)
    distributor = make_local(1, checkpoints=tmp_path / "kept", callbacks=[tracker])
    study = sweep(distributor, fit, {"x": [0.0, 1.0, 2.0]}, metric=("loss", "min"), trials=3, name="swept", at_once=1)
    assert study.best is not None
    (version,) = versions(server, "swept")
    tags = client(server).get_run(version.run_id).data.tags
    assert tags["distributor.run"] == study.best.run_id


@pytest.mark.long
def test_a_best_trial_of_an_earlier_driver_is_said_not_to_be_registered(
    make_local: Make, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for trials in (1, 2):
        tracker = MLflow("/earlier", server, register="earlier", model=build)
        distributor = make_local(1, checkpoints=tmp_path / "kept", callbacks=[tracker])
        sweep(distributor, fit, {"x": [0.0]}, metric=("loss", "min"), trials=trials, name="earlier", at_once=1)
    assert len(versions(server, "earlier")) == 1
    assert "no model is registered as earlier, since the best trial, 0, ran in an earlier driver" in caplog.text


def test_a_run_that_failed_registers_nothing(make_local: Make, server: str, tmp_path: Path) -> None:
    tracker = MLflow("/failed", server, register="failed", model=build)
    run = make_local(1, checkpoints=tmp_path / "kept", callbacks=[tracker]).submit(fit, entry="#")
    assert run.wait(watch.DEADLINE) and run.error is not None
    assert versions(server, "failed") == []


@pytest.mark.long
def test_ctrl_c_leaves_what_is_registered(
    make_local: Make, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("distributor.run.callback_thread.PATIENCE", 0.1)
    left = threading.Event()

    def build_slowly() -> Any:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        left.wait()
        return build()

    tracker = MLflow("/left", server, register="left", model=build_slowly)
    assert make_local(1, checkpoints=tmp_path / "kept", callbacks=[tracker]).run(fit) == "fitted"
    assert f"no longer waits for {tracker!r}, which goes on while this process lives" in caplog.text
    assert versions(server, "left") == []
    left.set()
    watch.until(lambda: len(versions(server, "left")) == 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"register": "digits"}, r"register='digits' needs model=, a function that returns the module"),
        ({"register": " ", "model": build}, r"register must be the name of a registered model, not ' '"),
        ({"register": 3, "model": build}, r"register must be the name of a registered model, not 3"),
        ({"register": "digits", "model": "build"}, r"model must be a function .*, not a str"),
        ({"model": build}, r"need register=, the name of the registered model"),
    ],
)
def test_what_is_to_be_registered_is_checked(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        MLflow("/x", **arguments)


def test_a_module_is_no_function_that_returns_one() -> None:
    with pytest.raises(ConfigurationError, match="model must be a function .*, not a Linear"):
        MLflow("/x", register="digits", model=build())


def test_mlflow_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.tracking.mlflow.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'distributor\[mlflow\]'"):
        MLflow("/x")
