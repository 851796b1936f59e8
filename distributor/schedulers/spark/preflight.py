"""Checks before a Spark session starts: that Java is new enough, and that the master answers.

Spark takes a minute or more to find this out, and reports it in pages of Java stack traces.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

from distributor.errors import ConfigurationError, ResourceError
from distributor.machine import devices
from distributor.schedulers.spark import java
from distributor.text import wording

#: What Spark accepts: SparkMasterRegex in
#: https://github.com/apache/spark/blob/master/core/src/main/scala/org/apache/spark/SparkContext.scala
_WITHIN = r"local(\[(\d+|\*)(\s*,\s*\d+)?\])?"
_CLUSTER = r"local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]"
_MASTER = rf"{_WITHIN}|{_CLUSTER}|yarn|(spark|k8s|sc)://.+"

#: A Connect server has a default port. The URL of a master must name one, usually 7077. Sources:
#: https://github.com/apache/spark/blob/master/sql/connect/docs/client-connection-string.md,
#: https://spark.apache.org/docs/latest/spark-standalone.html (SPARK_MASTER_PORT)
_CONNECT_PORT = 15002

_PATIENCE = 4.0  # seconds for a master to accept a connection
_RESOLVER = 10.0  # seconds to resolve its name: by default, a resolver tries twice, for five seconds each

#: Variables that make gRPC connect through a proxy: https://grpc.github.io/grpc/core/md_doc_environment_variables.html
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def check_master(master: str) -> None:
    """Check that Spark would accept a master URL, or raise ConfigurationError."""
    if re.fullmatch(_MASTER, master) is None:
        raise ConfigurationError(
            f"{wording.without_token(master)!r} is not a master that Spark knows: use spark://host:7077, yarn, "
            "k8s://https://host:443, local-cluster[2,1,1024], local[4], or sc://host for Spark Connect"
        )
    addresses(master)


def check(master: str, environ: Mapping[str, str], use_gpu: bool) -> None:
    """Check that Spark could start a session, without starting one.

    ConfigurationError: pyspark, Java or the configuration for yarn is missing, or the master does not answer.
    ResourceError: ranks would run on this machine, which lacks the GPUs.
    """
    shown = wording.without_token(master)
    if use_gpu and re.fullmatch(_WITHIN, master) and not devices.local_gpus(environ):
        raise ResourceError(
            f"use_gpu=True, but Spark with master {shown} has no executors, and this machine has no visible GPU "
            f"({devices.described(environ, devices.list_gpus())}): pass use_gpu=False to train on CPUs"
        )
    try:
        from pyspark.version import __version__ as spark
    except ImportError as error:
        raise ConfigurationError(
            f"training on Spark needs pyspark, which cannot be imported ({error}): pip install 'distributor[spark]'"
        ) from None
    if not master.startswith("sc://") and (reason := java.problem(spark, environ)) is not None:
        raise ConfigurationError(
            f"no Spark session with master {shown}: {reason}. To train on this machine without Spark and "
            "Java, pass local_mode=True"
        )
    configured = environ.get("HADOOP_CONF_DIR") or environ.get("YARN_CONF_DIR") or java.has_spark_env(environ)
    if master == "yarn" and not configured:
        raise ConfigurationError(
            "with master yarn, Spark finds the cluster through its configuration files, but neither HADOOP_CONF_DIR "
            "nor YARN_CONF_DIR is set: set one to the folder that has yarn-site.xml and core-site.xml"
        )
    _check_answers(master, environ)


def addresses(master: str) -> list[tuple[str, int]]:
    """Return hosts and ports in a ``spark://`` or ``sc://`` URL, of which one must answer; ``[]`` for other masters.

    >>> addresses("spark://a:7077,b:7078"), addresses("sc://[::1]/;user_id=me"), addresses("yarn")
    ([('a', 7077), ('b', 7078)], [('::1', 15002)], [])
    """
    scheme, _, rest = master.partition("://")
    if scheme == "spark":
        return [_address(f"spark://{one}", None) for one in rest.split(",")]
    return [_address(master, _CONNECT_PORT)] if scheme == "sc" else []


def _address(url: str, default: int | None) -> tuple[str, int]:
    shown = wording.without_token(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or default
    except ValueError as error:
        raise ConfigurationError(f"the master {shown!r} is not a URL: {error}") from None
    if not host:
        raise ConfigurationError(f"the master {shown!r} names no host: use spark://host:7077 or sc://host")
    if port is None:
        raise ConfigurationError(
            f"the master {shown!r} names no port: add it (7077 unless the master was started with another)"
        )
    if default is None and (parts.path or parts.query or parts.fragment):
        raise ConfigurationError(f"the master {shown!r} has more than a host and a port: use spark://{parts.netloc}")
    return host, port


def _check_answers(master: str, environ: Mapping[str, str]) -> None:
    """Check that something listens at a master's address, unless gRPC uses a proxy."""
    asked = addresses(master)
    if not asked or (master.startswith("sc://") and any(environ.get(name) for name in _PROXIES)):
        return
    answers: SimpleQueue[str | None] = SimpleQueue()
    for host, port in asked:
        # A name look-up cannot be interrupted: the thread may outlive this function.
        threading.Thread(target=lambda host=host, port=port: answers.put(_try(host, port)), daemon=True).start()
    deadline = time.monotonic() + _RESOLVER + _PATIENCE
    reasons: list[str] = []
    while len(reasons) < len(asked):
        try:
            reason = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            reasons.append(f"the name server does not answer within {_RESOLVER:g} s")
            break
        if reason is None:
            return
        reasons.append(reason)
    server, shown = "Spark Connect server" if master.startswith("sc://") else "master", wording.without_token(master)
    raise ConfigurationError(
        f"no Spark session with master {shown}: {'; '.join(sorted(reasons))}. Is the {server} running, and is this its "
        "address as seen from this machine?"
    )


def _try(host: str, port: int) -> str | None:
    """Return why nothing answers at a host's port; ``None`` if something does."""
    shown = wording.address(host, port)
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"this machine cannot resolve the name {host!r} ({getattr(error, 'strerror', None) or error})"
    deadline, reason = time.monotonic() + _PATIENCE, ""
    for left, (family, kind, protocol, _, address) in zip(range(len(resolved), 0, -1), resolved, strict=True):
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.settimeout(max(0.1, (deadline - time.monotonic()) / left))
                trial.connect(address)
                return None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
    return f"nothing answers at {shown} ({reason})"
