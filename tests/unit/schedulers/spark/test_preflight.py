"""What is found out before Spark starts: a master that does not answer, a Java that is not there."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributor import ConfigurationError, ResourceError
from distributor.schedulers.spark import preflight

pytest.importorskip("pyspark")

#: Seconds in which a dead master is told.
SOON = 5.0


@pytest.fixture
def closed() -> int:
    """A port at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def java(tmp_path: Path) -> Path:
    """A Java that says what its environment tells it to."""
    path = tmp_path / "jdk" / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\necho 'openjdk version \"17.0.15\" 2025-04-15' >&2\n")
    path.chmod(stat.S_IRWXU)
    return path


def refused(master: str, environ: dict[str, str]) -> str:
    begin = time.monotonic()
    with pytest.raises(ConfigurationError) as caught:
        preflight.check(master, environ, use_gpu=False)
    assert time.monotonic() - begin < SOON
    return str(caught.value)


def test_a_master_that_does_not_answer(closed: int, java: Path) -> None:
    told = refused(f"spark://127.0.0.1:{closed}", {"JAVA_HOME": str(java.parent.parent)})
    assert told == (
        f"no Spark session with master spark://127.0.0.1:{closed}: nothing answers at 127.0.0.1:{closed} (connection "
        "refused). Is the master running, and is this its address as seen from this machine?"
    )
    assert f"nothing answers at [::1]:{closed} (" in refused(f"sc://[::1]:{closed}", {})
    told = refused(f"sc://localhost:{closed}/;token=geheim;user_id=me", {})
    assert f"no Spark session with master sc://localhost:{closed}/;token=***;user_id=me: " in told
    assert "Is the Spark Connect server running" in told


def test_a_master_that_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packets go nowhere: this address is for documentation."""
    monkeypatch.setattr(preflight, "_PATIENCE", 0.2)
    assert "nothing answers at 192.0.2.1:7077 (" in refused("sc://192.0.2.1:7077", {})


def test_an_unknown_host_name_of_a_master_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    told = refused("sc://no-such-host", {})
    assert "this machine cannot resolve the name 'no-such-host' (Name or service not known)" in told


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_PATIENCE", 0.1)
    monkeypatch.setattr(preflight, "_RESOLVER", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(SOON) or [])
    assert "the name server does not answer within 0.1 s" in refused("sc://host", {})


def test_one_master_of_several_is_enough(closed: int, listening: int, java: Path) -> None:
    environ = {"JAVA_HOME": str(java.parent.parent)}
    preflight.check(f"spark://127.0.0.1:{closed},127.0.0.1:{listening}", environ, use_gpu=False)
    preflight.check(f"sc://127.0.0.1:{listening}", {}, use_gpu=False)
    told = refused(f"spark://127.0.0.1:{closed},127.0.0.1:1", environ)
    assert f"127.0.0.1:{closed} (connection refused); nothing answers at 127.0.0.1:1 (conn" in told or (
        f"127.0.0.1:1 (connection refused); nothing answers at 127.0.0.1:{closed} (conn" in told
    )


def test_masters_that_only_spark_can_reach_are_not_tried(closed: int, java: Path) -> None:
    environ = {"JAVA_HOME": str(java.parent.parent)}
    for master in ("local[2]", "k8s://https://127.0.0.1:1"):
        preflight.check(master, environ, use_gpu=False)
    preflight.check(f"sc://127.0.0.1:{closed}", {"https_proxy": "http://127.0.0.1:1"}, use_gpu=False)


def test_yarn_is_found_by_its_configuration(java: Path) -> None:
    environ = {"JAVA_HOME": str(java.parent.parent)}
    assert "neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set" in refused("yarn", environ)
    preflight.check("yarn", {**environ, "YARN_CONF_DIR": "/etc/hadoop"}, use_gpu=False)


def test_masters_that_spark_does_not_know() -> None:
    for master in (
        "local",
        "local[4]",
        "local[*]",
        "local[*, 3]",
        "local-cluster[2, 1,1024]",
        "yarn",
        "sc://a",
        "k8s://a",
    ):
        preflight.check_master(master)
    for master in ("local[", "local[2", "local[a]", "local-cluster[2,1]", "yarn-client", "spark://", "a:7077"):
        with pytest.raises(ConfigurationError, match="is not a master that Spark knows"):
            preflight.check_master(master)


def test_gpus_without_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.machine.devices.local_gpus", lambda environ: [])
    with pytest.raises(ResourceError, match=r"master local\[2\] has no executors, and this machine has no visible GPU"):
        preflight.check("local[2]", {}, use_gpu=True)


def test_no_java(tmp_path: Path) -> None:
    assert refused("local[2]", {"PATH": str(tmp_path)}) == (
        "no Spark session with master local[2]: no Java found (no java on the PATH, and JAVA_HOME is not set): "
        "install Java 17 or later (Debian: apt-get install openjdk-17-jre-headless). To train on this machine "
        "without Spark and Java, pass local_mode=True"
    )


def test_sparks_own_scripts_may_know_better(tmp_path: Path) -> None:
    (tmp_path / "spark-env.sh").touch()
    for master in ("local[2]", "yarn"):
        preflight.check(master, {"PATH": str(tmp_path), "SPARK_CONF_DIR": str(tmp_path)}, use_gpu=False)
