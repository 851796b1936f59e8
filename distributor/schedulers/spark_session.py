"""Spark sessions, classic and Connect: which one is active, and what it says of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from distributor.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: Seconds that Java gets to clean up after itself.
_JVM_PATIENCE = 5.0

#: What Spark takes for a master, and for the address of a Connect server.
_MASTER = r"local(\[|$|-cluster\[)|yarn$|(spark|k8s|sc)://."


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


def is_true(setting: Any) -> bool:
    """Whether the value of a setting is what Spark takes for true."""
    return str(setting).strip().lower() == "true"


def check_master(master: str) -> None:
    """Finds what Spark would refuse, after it has started Java to do so.

    Raises:
        ConfigurationError: it is no master's address.
    """
    if re.match(_MASTER, master) is None:
        raise ConfigurationError(
            f"{master!r} is no master that Spark knows: spark://host:7077, yarn, k8s://https://host:443, "
            "local-cluster[2,1,1024], or sc://host for Spark Connect"
        )


def _start_java(settings: Mapping[str, str]) -> None:
    """As Spark would by itself, but in a session of the system's of its own.

    Spark shields its JVM from SIGINT only. A SIGTERM to the group, as from ``timeout`` or a batch system, would end it
    with all executors, before ranks have had their grace period.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is None:
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
        told = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\tat ")]
        where = "" if master is None else f" with master {master}"
        raise ConfigurationError(f"no Spark session{where}: {' '.join(told[:2]) or repr(error)}") from None
