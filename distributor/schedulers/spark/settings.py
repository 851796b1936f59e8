"""Checks of a session's settings before a job starts in it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distributor.errors import ConfigurationError, PayloadError
from distributor.schedulers.spark import harmful_settings
from distributor.schedulers.spark.harmful_settings import Answer, Found, Where, is_true
from distributor.schedulers.spark.sessions import conf, is_cluster, is_connect
from distributor.shipping import package
from distributor.text import notices
from distributor.text.wording import parse_memory, size
from distributor.values.job import Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_log = notices.logger

#: Settings that request encryption of network traffic. They do not apply to torch's traffic.
_ENCRYPTION = (
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
)

_UNAUTHENTICATED = (
    "spark.authenticate is true, but ranks ignore this. NOT authenticated: NCCL's and gloo's connections between ranks "
    "(gradients, parameters) and torch's rendezvous store, so whoever can reach their ports can join. Authenticated: "
    "log lines and orders between nodes and driver (TLS and a token)"
)

_LARGE_CALL = 64 << 20  # bytes of a call from which it is compared with the heaps
_HEAP_SHARE = (
    0.6  # of a heap for the broadcast of a call: of 1 GiB, 600 MiB passed, and 800 MiB ended in OutOfMemoryError
)

#: By Spark context or Connect session.
_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def encryption(session: SparkSession) -> list[str]:
    """Return the names of the settings that request encryption and are true in a session."""
    # Users can change spark.ssl.enabled while the session runs, and PySpark's own distributor reads the new value.
    now = is_true(session.conf.get(_ENCRYPTION[0], "false"))
    return [key for key in _ENCRYPTION if is_true(conf(session, key)) or (now and key == _ENCRYPTION[0])]


def check_encryption(session: SparkSession, job: Job) -> None:
    """Check that the session requests no encryption, or that ``ignoreSsl`` accepts unencrypted traffic, with a warning.

    If it requests authentication alone, warn once a session. ConfigurationError: encryption is requested, and not
    waived.
    """
    settings = encryption(session)
    if not settings:
        if is_true(conf(session, "spark.authenticate")):
            _warn_once(session, _UNAUTHENTICATED)
        return
    accept = f"{job.launch.spark_prefix}.spark.distributor.ignoreSsl"
    text = (
        f"{' and '.join(settings)} {'is' if len(settings) == 1 else 'are'} true, but ranks ignore this. NOT encrypted: "
        "NCCL's and gloo's traffic between ranks (gradients, parameters) and torch's rendezvous store. Encrypted: log "
        "lines and orders between nodes and driver (TLS). For everything that goes through Spark (the function, "
        "results), Spark's settings apply"
    )
    if not is_true(session.conf.get(accept, "false")):
        raise ConfigurationError(f"{text}. To accept this, set {accept} to true in the Spark configuration")
    _log.warning("%s; accepted by %s", text, accept)


def _warn_once(session: SparkSession, text: str) -> None:
    """Log a warning, unless the session has had it."""
    # PySpark makes new objects for one classic session, but only one for its context.
    had = _warned.setdefault(session if is_connect(session) else session.sparkContext, set())
    if text not in had:
        had.add(text)
        _log.warning("%s", text)


def check_call(session: SparkSession, job: Job) -> None:
    """Check that the JVMs of a classic session can hold a large call, which they broadcast. PayloadError: no."""
    needed = package.call_size(job)
    if is_connect(session) or needed < _LARGE_CALL:
        return
    runtime = session.sparkContext._jvm.java.lang.Runtime.getRuntime()  # type: ignore[union-attr]
    heaps = {"driver": int(runtime.maxMemory())}
    if is_cluster(session):
        with suppress(ValueError):
            heaps["executor"] = parse_memory(conf(session, "spark.executor.memory") or "1g", "m")
    for process, heap in heaps.items():
        if needed > heap * _HEAP_SHARE:
            raise PayloadError(
                f"{job.title} has {size(needed)} of data with it, too much for Spark's {process}, whose heap has "
                f"{size(heap)}: save the data to a file that all nodes can read, and load it inside the function, or "
                f"raise spark.{process}.memory to {size(needed / _HEAP_SHARE)} or more"
            )


def check_hazards(session: SparkSession) -> list[Found]:
    """Return the settings that may explain the loss of a long task. Warn, once a session, of those that may be meant.

    ConfigurationError: a setting rules out barrier mode or long tasks.
    """
    wheres = [Where.ALL, *([Where.EXECUTORS] * is_cluster(session)), *([Where.CONNECT] * is_connect(session))]
    hazards = harmful_settings.find(str(session.version), wheres, lambda name: conf(session, name))
    for found in hazards:
        if found.hazard.answer is Answer.REFUSE:
            raise ConfigurationError(found.text)
        if found.hazard.answer is Answer.WARN:
            _warn_once(session, found.text)
    return hazards
