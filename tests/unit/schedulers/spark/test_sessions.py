"""What is decided about a Spark session without one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import watch

from distributor.api.scheduling import choose_session
from distributor.errors import ConfigurationError, ResourceError
from distributor.schedulers.spark import sessions
from distributor.schedulers.spark.sessions import Life, answering, check_alive, life_of, named, task_python, without_bar

OURS, NAMED = "/venv/bin/python", "/opt/python"


@pytest.mark.parametrize("master", ["local", "local[4]", "local[*, 3]", "local-cluster[2,1,1024]"])
def test_masters_on_this_machine_run_the_drivers_python(master: str) -> None:
    assert task_python(master, {}, None, OURS) == OURS
    assert task_python(master, {"PYSPARK_PYTHON": ""}, None, OURS) == OURS


@pytest.mark.parametrize("master", ["spark://localhost:7077", "yarn", "k8s://https://a", "local.example"])
def test_other_masters_run_what_spark_takes(master: str) -> None:
    assert task_python(master, {}, None, OURS) is None


@pytest.mark.parametrize("master", ["local[4]", "local-cluster[2,1,1024]", "yarn"])
def test_the_users_python_wins(master: str) -> None:
    assert task_python(master, {"PYSPARK_PYTHON": NAMED}, None, OURS) is None
    assert task_python(master, {"PYSPARK_PYTHON": NAMED}, "/usr/bin/python3", OURS) is None
    assert task_python(master, {}, NAMED, OURS) == NAMED  # which Spark reads in spark-submit only
    assert task_python(master, {"PYSPARK_DRIVER_PYTHON": "jupyter"}, NAMED, OURS) == NAMED
    assert task_python(master, {"PYSPARK_DRIVER_PYTHON": "jupyter"}, None, OURS) is None


def test_a_driver_that_does_not_know_its_python() -> None:
    assert task_python("local[4]", {}, None, "") is None


class Java:
    """A context of Spark's in the JVM."""

    def __init__(self, says: Any) -> None:
        self.says = says

    def sc(self) -> Java:
        return self

    def isStopped(self) -> bool:
        if isinstance(self.says, Exception):
            raise self.says
        return bool(self.says)


def spark(says: Any, master: str = "spark://host:7077") -> Any:
    java = None if says is None else Java(says)
    return SimpleNamespace(sparkContext=SimpleNamespace(_jsc=java, master=master))


@pytest.mark.parametrize(
    ("says", "life", "text"),
    [
        (False, Life.ALIVE, None),
        (True, Life.HALTED, "its context was stopped (Spark's log on the driver says why if you did not stop it)"),
        (None, Life.STOPPED, "its context was stopped"),
        (ConnectionRefusedError(111, "refused"), Life.DEAD, "its JVM has ended (killed, out of memory, or crashed)"),
    ],
)
def test_a_session_that_has_ended_is_refused_with_the_reason(says: Any, life: Life, text: str | None) -> None:
    sessions = spark(says)
    assert life_of(sessions) is life
    if text is None:
        check_alive(sessions)
    else:
        with pytest.raises(ConfigurationError) as caught:
            check_alive(sessions)
        told = f"the active Spark session (master spark://host:7077) cannot be used: {text}"
        assert str(caught.value).startswith(told)


@pytest.mark.parametrize(("master", "refused"), [("local[4]", False), ("local-cluster[2,1,1024]", True)])
def test_where_a_run_goes_after_the_jvm_has_ended(master: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that would not have been used is not missed."""
    pytest.importorskip("pyspark")  # a process with a session has imported it
    monkeypatch.setattr(sessions, "active_session", lambda: spark(OSError("no"), master))
    assert choose_session(True) == (None, True)
    for local_mode in (None, False):
        if refused or local_mode is False:
            with pytest.raises(ConfigurationError, match=r"its JVM has ended"):
                choose_session(local_mode)
        else:
            assert choose_session(local_mode) == (None, True)


def test_errors_of_calls_to_spark_become_configuration_errors() -> None:
    with pytest.raises(ConfigurationError, match="the active Spark session cannot be used: no route to the server"):
        with answering():
            raise RuntimeError("no route to the server\n\tat java.lang.A")
    with pytest.raises(ResourceError, match="as it is"):
        with answering():
            raise ResourceError("as it is")


def test_gpus_of_a_driver_whose_jvm_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        @property
        def resources(self) -> Any:
            raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", Dead())
    assert sessions.driver_gpus() is None


class Bar:
    """Spark's progress bar, and its class and private field."""

    def __init__(self, shown: bool = True) -> None:
        self.shown, self.hidden, self.fields = shown, 0, ["lastFinishTime"]
        self.third = threading.Event()

    def progressBar(self) -> Bar:
        return self

    def isEmpty(self) -> bool:
        return not self.shown

    def get(self) -> Bar:
        return self

    def getClass(self) -> Bar:
        return self

    def getDeclaredField(self, name: str) -> Bar:
        if name not in self.fields:
            raise RuntimeError(f"java.lang.NoSuchFieldException: {name}")
        return self

    def setAccessible(self, _: bool) -> None:
        pass

    def setLong(self, bar: Bar, milliseconds: int) -> None:
        assert milliseconds > time.time() * 1000

    def finishAll(self) -> None:
        self.hidden += 1
        if self.hidden == 3:
            self.third.set()


def with_bar(bar: Bar) -> Any:
    java = SimpleNamespace(sc=lambda: bar)
    return SimpleNamespace(sparkContext=SimpleNamespace(_jsc=java))


def test_sparks_bar_is_hidden_again_and_again_until_the_end() -> None:
    bar = Bar()
    with without_bar(with_bar(bar)):
        assert bar.hidden >= 1
        assert bar.third.wait(watch.DEADLINE)
    assert bar.hidden >= 4  # the last order ends the earlier ones
    assert not [thread for thread in threading.enumerate() if thread.name == "distributor-bar"]


def test_a_bar_that_cannot_be_hidden_is_left_alone_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    bar = Bar()
    bar.fields.clear()
    with without_bar(with_bar(bar)):
        assert not [thread for thread in threading.enumerate() if thread.name == "distributor-bar"]
    (record,) = caplog.records
    assert "set spark.ui.showConsoleProgress to false" in record.getMessage()


class Context:
    """A SparkContext, as far as a second one for the same JVM needs it."""

    pythonExec = "python3"

    def __init__(self) -> None:
        self.pythonExec, self.defaultParallelism = "python3", 2


class Sealed(Context):
    """A context of which no second object can be made."""

    def __new__(cls, *given: object) -> Sealed:
        if not given:
            raise TypeError("use SparkContext.getOrCreate()")
        return super().__new__(cls)

    def __init__(self, *given: object) -> None:
        super().__init__()


def test_a_second_context_has_another_python(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = Context()
    assert sessions._with_python(context, "/env/python").pythonExec == "/env/python"
    assert (context.pythonExec, caplog.records) == ("python3", [])


def test_a_context_that_cannot_be_copied_stays_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = Sealed("given")
    assert sessions._with_python(context, "/env/python") is context
    (record,) = caplog.records
    assert "set spark.pyspark.python to /env/python" in record.getMessage()


def test_jobs_of_another_pyspark_keep_their_name_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = SimpleNamespace()
    with named(context, "run at train.py:12"):
        ran = True
    (record,) = caplog.records
    assert ran and "cannot name the run's jobs" in record.getMessage()


def test_without_a_bar_nothing_is_hidden() -> None:
    bar = Bar(shown=False)
    with without_bar(with_bar(bar)):
        pass
    assert bar.hidden == 0


def test_a_master_beside_an_address_of_spark_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://host-a")
    told = r"^no Spark session with master spark://host-b:7077: .*Spark Connect"
    with pytest.raises(ConfigurationError, match=told):
        sessions.create("spark://host-b:7077", {})


@pytest.mark.parametrize(
    ("jars", "told"),
    [
        (None, "SPARK_HOME is {home}, where there is no Spark, but Python imports pyspark {pyspark}: unset SPARK_HOME"),
        (
            ["spark-core_2.12-3.5.9.jar"],
            "SPARK_HOME is {home}, which has Spark 3.5.9, but Python imports pyspark {pyspark}: unset SPARK_HOME, or "
            "install pyspark 3.5.9",
        ),
        (["spark-core_2.13-{pyspark}-vendor-1.jar", "spark-core-extras.jar"], "the true reason"),
    ],
)
def test_a_session_that_cannot_start_from_another_spark(
    jars: list[str] | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import __version__ as pyspark

    for name in jars or ():
        (tmp_path / "spark" / "jars").mkdir(parents=True, exist_ok=True)
        (tmp_path / "spark" / "jars" / name.format(pyspark=pyspark)).touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    monkeypatch.setattr(sessions, "_start_java", fail)
    with pytest.raises(ConfigurationError) as caught:
        sessions.create("local[2]", {})
    expected = told.format(home=tmp_path / "spark", pyspark=pyspark)
    assert str(caught.value) == f"no Spark session with master local[2]: {expected}"


def fail(_: object) -> None:
    raise RuntimeError("the true reason")


def test_the_token_of_an_address_is_in_no_error() -> None:
    with pytest.raises(ConfigurationError) as caught:
        sessions.create("sc://host:1/;token=geheim==", {})
    assert "no Spark session with master sc://host:1/;token=***: " in str(caught.value)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("caller", "call"), [("__main__", "run at train.py:3"), ("distributor.cli.run", "distributor run")]
)
def test_the_users_call_is_where_this_packages_frames_begin(caller: str, call: str) -> None:
    ours: dict[str, Any] = {"__name__": "distributor.api", "users_call": sessions.users_call}
    exec("def run():\n    return users_call()", ours)
    users = {"__name__": caller, "run": ours["run"]}
    exec(compile("\n\ncall = run()", "/home/me/train.py", "exec"), users)
    assert users["call"] == call
