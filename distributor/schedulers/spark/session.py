"""Spark sessions, classic and Connect: which one is active, and what it says of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from distributor.errors import ConfigurationError
from distributor.schedulers.spark import java

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


#: Seconds that Java gets to clean up after itself.
_JVM_PATIENCE = 5.0

#: What classic sessions run where nobody has said anything else.
_SPARKS_PYTHON = "python3"

#: The Python of Spark Connect's workers, for one session of the server. Internal to Spark, there since 3.5:
#: https://github.com/apache/spark/blob/v3.5.0/sql/catalyst/src/main/scala/org/apache/spark/sql/internal/SQLConf.scala
_CONNECT_PYTHON = "spark.sql.execution.pyspark.python"

#: Seconds between orders to Spark's bar of tasks to stay away; each holds for half a second.
_BAR_INTERVAL = 0.2


def active_session() -> SparkSession | None:
    """The session that is active in this process, classic or Connect; never creates one."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None and is_connect(active):
        return active
    # The active session is a matter of the thread; the default one is of the process.
    classic = active or SparkSession._instantiatedSession
    if classic is not None and classic.sparkContext._jsc is not None:
        return classic
    # Importing it pulls in pandas and grpc; a process with a Connect session has done so.
    connect = sys.modules.get("pyspark.sql.connect.session")
    if connect is None:
        return None
    remote = connect.SparkSession.getActiveSession() or connect.SparkSession._default_session
    return cast("SparkSession | None", remote)


def driver_gpus() -> tuple[str, ...] | None:
    """Addresses of the GPUs that Spark's discovery found for the driver (``spark.driver.resource.gpu.amount``).

    ``None`` where there is no classic context, or it was given none.
    """
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    found = context.resources.get("gpu") if context is not None else None
    return tuple(found.addresses) if found is not None else None


def is_connect(session: SparkSession) -> bool:
    """Whether a session talks to a Spark Connect server."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def master_of(session: SparkSession) -> str:
    """The master URL, from the context itself where there is one: a session's setting can be changed later."""
    if is_connect(session):
        return str(session.conf.get("spark.master", ""))
    return str(session.sparkContext.master)


def is_cluster(session: SparkSession) -> bool:
    """Whether the session has executors of its own: any master but ``local`` and ``local[...]``; any Connect server."""
    return is_connect(session) or re.match(r"local(\[|$)", master_of(session)) is None


def conf(session: SparkSession, key: str, default: str | None = None) -> Any:
    """A setting, from the context where there is one."""
    if is_connect(session):
        return session.conf.get(key, default)
    return session.sparkContext._conf.get(key, default)  # getConf() copies them all, one call of the JVM for each


def task_python(master: str, environ: Mapping[str, str], configured: str | None, driver: str) -> str | None:
    """The Python that tasks are to run where Spark by itself would take another; ``None`` leaves it to Spark.

    Spark takes PYSPARK_PYTHON, or else ``python3`` from PATH; it reads spark.pyspark.python in ``spark-submit`` only.
    On this machine's masters the driver's Python is a better guess: it has what the user has installed.

    Args:
        master: the master URL.
        environ: the driver's environment.
        configured: spark.pyspark.python.
        driver: the driver's own Python.

    >>> task_python("local[4]", {}, None, "/venv/bin/python")
    '/venv/bin/python'
    >>> task_python("spark://host:7077", {}, None, "/venv/bin/python") is None
    True
    >>> task_python("local[4]", {"PYSPARK_PYTHON": "python3.12"}, None, "/venv/bin/python") is None
    True
    """
    if environ.get("PYSPARK_PYTHON"):
        return None
    if configured:
        return configured
    here = re.match(r"local(\[|$|-cluster\[)", master) is not None
    return driver if here and driver and not environ.get("PYSPARK_DRIVER_PYTHON") else None


def context_for_tasks(session: SparkSession) -> SparkContext:
    """A classic session's context, as one whose tasks run the Python of :func:`task_python`.

    Where that is not Spark's own choice, it is another view of the same context: the user's jobs go on as they were.
    """
    context = session.sparkContext
    python = task_python(master_of(session), os.environ, conf(session, "spark.pyspark.python"), sys.executable)
    if python is None or context.pythonExec != _SPARKS_PYTHON:
        return context
    view = type(context).__new__(type(context))
    vars(view).update(vars(context), pythonExec=python)
    return view


def set_connect_python(session: SparkSession) -> None:
    """Has a Connect server that this process started (``remote("local[4]")``) run :func:`task_python`.

    It stays for the session, unless the user has set it. A server that somebody else started has a Python of its own,
    even if it is on this machine: it may be in a container.
    """
    if "SPARK_LOCAL_REMOTE" not in os.environ or session.conf.get(_CONNECT_PYTHON, None):
        return
    configured = session.conf.get("spark.pyspark.python", None)
    python = task_python(master_of(session), os.environ, configured, sys.executable)
    if python is not None:
        session.conf.set(_CONNECT_PYTHON, python)


def is_true(setting: Any) -> bool:
    """Whether the value of a setting is what Spark takes for true."""
    return str(setting).strip().lower() == "true"


@contextmanager
def without_bar(session: SparkSession) -> Iterator[None]:
    """While inside, Spark does not show its bar of tasks (``[Stage 0:> ...``).

    The bar has no end of line, so that what follows it would be glued to it, and says nothing of a run. ``finishAll``
    clears it and keeps it away for half a second (``ConsoleProgressBar.refresh``); Spark does that between jobs. So it
    comes back by itself after the run.
    """
    bar = cast(Any, session).sparkContext._jsc.sc().progressBar()
    if bar.isEmpty():
        yield
        return
    ended = threading.Event()

    def keep_away() -> None:
        with suppress(Exception):  # Spark's context was stopped
            bar.get().finishAll()
            while not ended.wait(_BAR_INTERVAL):
                bar.get().finishAll()

    keeper = threading.Thread(target=keep_away, name="distributor-bar", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        with suppress(Exception):
            bar.get().finishAll()


def _start_java(settings: Mapping[str, str]) -> None:
    """As Spark would by itself, but in a session of the system's of its own.

    Spark shields its JVM from SIGINT only. A SIGTERM to the group, as from ``timeout`` or a batch system, would end it
    with all executors, before ranks have had their grace period.
    """
    from pyspark import SparkConf, SparkContext, __version__
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is None:
        if "PYSPARK_GATEWAY_PORT" not in os.environ and (reason := java.problem(__version__)) is not None:
            raise RuntimeError(reason)
        conf = SparkConf().setAll(list(settings.items()))
        gateway = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway, conf=conf)


def end_java() -> None:
    """Ends the JVM that :func:`create` has started, if it has come so far, from wherever a signal arrives."""
    gateway = getattr(getattr(sys.modules.get("pyspark"), "SparkContext", None), "_gateway", None)
    jvm = getattr(gateway, "proc", None)
    if jvm is not None:
        jvm.terminate()
        with suppress(subprocess.TimeoutExpired):
            jvm.wait(_JVM_PATIENCE)
        jvm.kill()


def create(master: str | None, settings: Mapping[str, str]) -> SparkSession:
    """A session, or the one that is active. Signals to this process's group do not reach the Java that it starts.

    Args:
        master: of the cluster, ``sc://...`` for Spark Connect; ``None`` for what Spark's own settings say.
        settings: Spark's settings by name.

    Raises:
        ConfigurationError: Spark cannot be started, or does not know the master.
    """
    from pyspark.sql import SparkSession

    remote = master is not None and master.startswith("sc://")
    builder: Any = SparkSession.builder.appName("distributor")
    if master is not None:
        builder = builder.remote(master) if remote else builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        if not remote and "SPARK_REMOTE" not in os.environ:
            _start_java({**settings, **({} if master is None else {"spark.master": master})})
        session: SparkSession = builder.getOrCreate()
        return session
    except Exception as error:
        # Spark's own word comes first; what follows is Java's.
        if "on a stopped SparkContext" in str(error):  # stopped by itself: what was wrong, it has told its log
            error = RuntimeError(
                "it has stopped while it started; Spark's log above says why (does a master answer there?)"
            )
        where = "" if master is None else f" with master {master}"
        raise ConfigurationError(f"no Spark session{where}: {_first_words(error)}") from None


def _first_words(error: Exception) -> str:
    """What Spark says of an error, without where in Java it came from.

    >>> _first_words(RuntimeError("An error occurred while calling None.a.B.\\n: a.b.SparkException: no\\n\\tat a.b.C"))
    'no'
    """
    told = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\tat ")]
    words = re.sub(r"^An error occurred while calling \S+ : ", "", " ".join(told[:2]))
    return re.sub(r"^(?:[\w.$]+(?:Exception|Error): )+", "", words) or repr(error)
