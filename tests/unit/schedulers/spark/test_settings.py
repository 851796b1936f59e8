"""Which settings of a session rule out a run, or are worth a warning."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import make_job

from distributor.errors import ConfigurationError, PayloadError
from distributor.launch.torchrun import Torchrun
from distributor.schedulers.spark import harmful_settings, settings as checks
from distributor.values.job import Function

JOB = make_job("r1", 2, Function("train", b"pickled"), False, launch=Torchrun())


class Settings:
    """A classic session that has settings only."""

    def __init__(self, master: str, version: str = "4.3.0", **settings: str) -> None:
        self.conf = self.sparkContext = self
        self._conf = {name.replace("_", "."): value for name, value in settings.items()}
        self.master, self.version = master, version
        self._jvm: Any = None

    def get(self, key: str, default: str | None = None) -> str | None:
        return self._conf.get(key, default)


@pytest.mark.parametrize(
    ("master", "heap", "executors", "words"),
    [
        ("local[2]", 200, "150m", None),
        (
            "local[2]",
            140,
            "1g",
            "too much for Spark's driver, whose heap has 140 MiB: .* raise spark.driver.memory to 167",
        ),
        ("spark://host", 200, "150m", "too much for Spark's executor, whose heap has 150 MiB"),
        ("spark://host", 200, "1g", None),
        ("spark://host", 200, "a lot", None),
    ],
)
def test_a_call_that_a_heap_cannot_hold_is_refused(master: str, heap: int, executors: str, words: str | None) -> None:
    session = Settings(master, spark_executor_memory=executors)
    runtime = SimpleNamespace(maxMemory=lambda: heap << 20)
    lang = SimpleNamespace(Runtime=SimpleNamespace(getRuntime=lambda: runtime))
    session._jvm = SimpleNamespace(java=SimpleNamespace(lang=lang))
    checks.check_call(session, JOB)
    with tempfile.TemporaryFile() as file, nullcontext() if words is None else pytest.raises(PayloadError, match=words):
        file.truncate(100 << 20)
        checks.check_call(session, replace(JOB, target=Function("train", file)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spark_ssl_enabled": " True "}, "spark.ssl.enabled is true"),
        ({"spark_network_crypto_enabled": "true"}, "spark.network.crypto.enabled is true"),
        (
            {"spark_authenticate": "true", "spark_authenticate_enableSaslEncryption": "true"},
            "spark.authenticate.enableSaslEncryption is true",
        ),
    ],
)
def test_encryption_is_refused_unless_ignore_ssl_is_set(
    settings: dict[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{words}, .* set pytorch\.spark\.distributor\.ignoreSsl to true"):
        checks.check_encryption(Settings("local[2]", **settings), JOB)
    assert caplog.text == ""
    checks.check_encryption(Settings("local[2]", **settings, pytorch_spark_distributor_ignoreSsl="true"), JOB)
    assert f"{words}, but" in caplog.text
    assert "accepted by pytorch.spark.distributor.ignoreSsl" in caplog.text


def test_authentication_alone_is_a_warning_once_a_session(caplog: pytest.LogCaptureFixture) -> None:
    """It is not encryption, and Spark promises none."""
    checks.check_encryption(Settings("local[2]", spark_authenticate="false"), JOB)
    assert caplog.text == ""
    session = Settings("local[2]", spark_authenticate=" True ")
    for _ in range(2):
        checks.check_encryption(session, JOB)
    (warning,) = caplog.messages
    assert warning.startswith("spark.authenticate is true, but")
    assert "NOT authenticated: NCCL's and gloo's" in warning
    assert checks.encryption(session) == []
    checks.check_encryption(Settings("local[2]", spark_authenticate="true"), JOB)
    assert len(caplog.messages) == 2


# Settings that end or starve a long task

IDLE = {"spark_python_worker_killOnIdleTimeout": "true", "spark_python_worker_idleTimeoutSeconds": "5m"}
IDLE_OF_SESSION = {
    "spark_sql_execution_pyspark_udf_killOnIdleTimeout": "true",
    "spark_sql_execution_pyspark_udf_idleTimeoutSeconds": "300",
}
DYNAMIC = {"spark_dynamicAllocation_enabled": "true"}
SILENT = {"spark_connect_progress_reportInterval": "-1"}
KILLS = {"spark_excludeOnFailure_enabled": "true", "spark_excludeOnFailure_killExcludedExecutors": "true"}
DRIVER = {"spark_driver_timeout": "60min", "spark_plugins": "a.B,org.apache.spark.deploy.DriverTimeoutPlugin"}
CLUSTER, CONNECT = "spark://a:7077", "sc://a"


class Remote(Settings):
    """A session of a Spark Connect server that has settings only."""


Remote.__module__ = "pyspark.sql.connect.session"


def session(master: str, version: str = "4.3.0", **settings: str) -> Settings:
    return (Remote if master == CONNECT else Settings)(master, version, **settings)


def connect_timeout(text: str) -> dict[str, str]:
    return {"spark_connect_session_manager_defaultSessionTimeout": text}


@pytest.mark.parametrize(
    ("master", "settings", "words"),
    [
        (CLUSTER, DYNAMIC, ["spark.dynamicAllocation.enabled is true: ", "SPARK-24942", "Set it to false"]),
        (
            "local[2]",
            IDLE,
            [
                "spark.python.worker.killOnIdleTimeout is true and spark.python.worker.idleTimeoutSeconds is 5m: ",
                "Set spark.python.worker.killOnIdleTimeout to false",
            ],
        ),
        (
            CONNECT,
            IDLE,
            [
                "spark.python.worker.killOnIdleTimeout is true and ",
                "Set spark.sql.execution.pyspark.udf.killOnIdleTimeout to false",
            ],
        ),
        (
            CONNECT,
            {**IDLE, **IDLE_OF_SESSION},
            ["spark.sql.execution.pyspark.udf.killOnIdleTimeout is true and ", "idleTimeoutSeconds is 300: "],
        ),
        (
            CONNECT,
            {**SILENT, **connect_timeout("2m")},
            ["defaultSessionTimeout is 2m and spark.connect.progress.reportInterval is -1: ", "on the server"],
        ),
        (CONNECT, connect_timeout("1000"), ["defaultSessionTimeout is 1000: "]),
    ],
)
def test_settings_that_end_long_tasks_are_refused(master: str, settings: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        checks.check_hazards(session(master, **settings))
    assert all(word in str(refused.value) for word in words)
    assert str(refused.value).startswith("spark.")


@pytest.mark.parametrize(
    ("master", "version", "settings"),
    [
        (CLUSTER, "4.3.0", {}),
        (CONNECT, "4.3.0", {}),
        ("local[2]", "4.3.0", DYNAMIC),
        ("local[2]", "4.3.0", KILLS),
        # Spark 3.5 and 4.0 do not know the setting.
        (CLUSTER, "3.5.9", IDLE),
        (CONNECT, "4.0.2", IDLE_OF_SESSION),
        (CLUSTER, "4.3.0", {**IDLE, "spark_python_worker_idleTimeoutSeconds": "0"}),
        (CLUSTER, "4.3.0", {**IDLE, "spark_python_worker_idleTimeoutSeconds": "no number"}),
        (CLUSTER, "4.3.0", {**IDLE, "spark_python_worker_killOnIdleTimeout": "false"}),
        (CLUSTER, "4.3.0", IDLE_OF_SESSION),  # settings of Spark SQL, which runs no tasks of a classic session's run
        (CONNECT, "4.3.0", {**IDLE, "spark_sql_execution_pyspark_udf_killOnIdleTimeout": "false"}),
        (CONNECT, "4.3.0", SILENT),
        (CONNECT, "4.3.0", connect_timeout("10s")),
        (CONNECT, "4.3.0", {**SILENT, **connect_timeout("-1")}),
        (CLUSTER, "4.3.0", {**DRIVER, "spark_plugins": "a.B"}),
        (CLUSTER, "4.3.0", {**DRIVER, "spark_driver_timeout": "0"}),
    ],
)
def test_harmless_settings_are_allowed(
    master: str, version: str, settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    checks.check_hazards(session(master, version, **settings))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (KILLS, ["killExcludedExecutors is true and spark.excludeOnFailure.enabled is true: Spark ends an executor"]),
        (DRIVER, ["spark.driver.timeout is 60min and spark.plugins is ", "Spark ends the driver"]),
    ],
)
def test_settings_that_may_end_long_tasks_are_warned_of_once_a_session(
    settings: dict[str, str], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    once = session(CLUSTER, **settings)
    for _ in range(2):
        checks.check_hazards(once)
    (warning,) = caplog.messages
    assert all(word in warning for word in words)


# What Spark says of a lost task, explained by a setting

REAPER = {"spark_task_reaper_enabled": "true", "spark_task_reaper_killTimeout": "60s"}
DECOMMISSION = {"spark_executor_decommission_forceKillTimeout": "4s"}
BARRIER = {"spark_barrier_sync_timeout": "1s"}
KILLED = "executor 0 exited unrelated to the running tasks) Reason: Executor killed by driver."
GATHERING = 'line 493, in allGather\n    return 1\n  File "a.py", line 604, in read_int\n    raise EOFError\nEOFError\n'


@pytest.mark.parametrize(
    ("master", "settings", "said", "words"),
    [
        (CLUSTER, REAPER, "Reason: Command exited with code 57", "spark.task.reaper.killTimeout is 60s: Spark ends an"),
        (CLUSTER, REAPER, "Reason: Command exited with code 50", "spark.task.reaper.killTimeout"),  # Spark 3.5
        (CLUSTER, REAPER, "Reason: Command exited with code 137", ""),
        (CLUSTER, {**REAPER, "spark_task_reaper_killTimeout": "-1"}, "Reason: Command exited with code 57", ""),
        (CLUSTER, {}, KILLED, ""),
        (CLUSTER, DECOMMISSION, KILLED, "spark.executor.decommission.forceKillTimeout is 4s: Spark ends an executor"),
        (CLUSTER, KILLS, KILLED, "spark.excludeOnFailure.killExcludedExecutors is true"),
        (CLUSTER, {**KILLS, **DECOMMISSION}, KILLED, "spark.executor.decommission.forceKillTimeout is 4s"),
        ("local[2]", BARRIER, GATHERING, "spark.barrier.sync.timeout is 1s: Spark ends"),
        (CLUSTER, {}, GATHERING, ""),
        (CLUSTER, BARRIER, "ValueError: no", ""),
        (
            CONNECT,
            {},
            "[INVALID_HANDLE.SESSION_CLOSED] Session was closed",
            "Spark closes a session that makes no call for spark.connect.session.manager.defaultSessionTimeout",
        ),
        (CLUSTER, {}, "[INVALID_HANDLE.SESSION_CLOSED] Session was closed", ""),
        (
            CONNECT,
            {"spark_connect_execute_manager_detachedTimeout": "5s"},
            "[INVALID_HANDLE.OPERATION_ABANDONED] Operation was considered abandoned because of inactivity",
            "spark.connect.execute.manager.detachedTimeout is 5s: Spark ends a query whose client does not fetch",
        ),
    ],
)
def test_a_setting_explains_a_lost_task(master: str, settings: dict[str, str], said: str, words: str) -> None:
    explained = harmful_settings.explain(checks.check_hazards(session(master, **settings)), said)
    assert words in explained
    assert (explained == "") is (words == "")
