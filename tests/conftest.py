"""Fixtures: where a run goes, and how to make one; a temporary folder for each process that runs tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed_trainings
import pytest
import unset
import watch
from leftovers import Leftovers
from proxy import Proxy
from sessions import LOCAL, MASTERS, Make, Sessions

from distributor import Run, TorchDistributor
from distributor.channel.server import ChannelServer
from distributor.machine import devices
from distributor.values.environment import CHECK_GPUS
from distributor.values.plan import Endpoint

# Tests run as if nothing of Spark, torchrun or a proxy were set, but for what `sessions` has set.
for name in unset.foreign(os.environ) - {"SPARK_CONF_DIR"}:
    del os.environ[name]

# Several processes run tests side by side. What a test looks for, files and processes, is found by this folder, which
# all that it starts has in its environment. The name is short: paths of sockets are bounded.
os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="dt-", dir=tempfile.gettempdir())
os.chmod(tempfile.tempdir, 0o1777)  # as /tmp
atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
os.environ["DISTRIBUTOR_RUNS"] = os.path.join(tempfile.tempdir, "runs")  # not in the user's cache folder

# A shell lets what it starts in the background ignore SIGINT, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    """One process runs all tests of a session, which takes seconds to start."""
    if (session := _session(item)) is not None:
        item.add_marker(pytest.mark.xdist_group(session))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests begin first: nothing long is left for the end, where several processes run them side by side.

    DeepSpeed's tests are slow: its extensions take two minutes to build. They begin late, and the extensions are built
    meanwhile, so that no process waits for them.
    """
    for item in items:
        if _uses_deepspeed(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("spark") is not None and item.get_closest_marker("long_on_executors") is not None:
            item.add_marker(pytest.mark.long)
        if "frameworks" in item.path.parts and _session(item) is not None:
            item.add_marker(pytest.mark.long)  # make test-frameworks runs all of them
        if _needs_executors(item) and item.get_closest_marker("slow") and not item.get_closest_marker("ci"):
            item.add_marker(pytest.mark.long)
    items.sort(key=_place)


def pytest_collection_finish(session: pytest.Session) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0" and any(map(_uses_deepspeed, session.items)):
        _build_deepspeed()


def _place(item: pytest.Item) -> tuple[bool, ...]:
    """By which tests are sorted."""
    return not _on_hosts(item), "unit" in item.path.parts, _uses_deepspeed(item), _session(item) is None


def _session(item: pytest.Item) -> str | None:
    """Which Spark session it uses, if any."""
    if _on_hosts(item):
        return item.path.stem
    fixtures = getattr(item, "fixturenames", ())
    call = getattr(item, "callspec", None)
    masters = {value for value in (call.params.values() if call else ()) if isinstance(value, str)}
    if "two_executors" in fixtures or MASTERS[-1] in masters:
        return "executors"
    if "one_jvm" in fixtures or MASTERS[0] in masters:
        return "one JVM"
    return "others" if "sessions" in fixtures else None


def _needs_executors(item: pytest.Item) -> bool:
    """Whether it needs executors, hosts, or a session of its own, whose JVMs share CI's two cores with all else."""
    return _session(item) not in (None, "one JVM")


def _uses_deepspeed(item: pytest.Item) -> bool:
    return "deepspeed" in getattr(item, "fixturenames", ())


def _build_deepspeed() -> None:
    """Begins to build DeepSpeed's extensions, in a process that is none of these tests'."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).with_name('support'))!r}); import deepspeed_trainings"
    subprocess.Popen(
        [sys.executable, "-c", f"{code}; deepspeed_trainings.build_extensions()"],
        env={name: value for name, value in os.environ.items() if name != "TMPDIR"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _on_hosts(item: pytest.Item) -> bool:
    """Whether it makes hosts of network namespaces, which takes long."""
    return "cluster" in item.path.parts or item.path.stem == "test_cuts"


@pytest.fixture(scope="session")
def sessions() -> Iterator[Sessions]:
    if shutil.which("java") is None:
        pytest.skip("no Java here")
    pytest.importorskip("pyspark")
    shared = Sessions()
    yield shared
    shared.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that has failed leaves no run to those after it."""
    report = yield
    if report.when == "call" and report.failed:
        for run in [run for run in gc.get_objects() if type(run) is Run and not run.wait(0)]:
            run.kill()
    return report


@pytest.fixture(scope="session")
def deepspeed() -> None:
    """DeepSpeed with its extensions, which take a minute and more to build, once on a machine."""
    pytest.importorskip("deepspeed")
    deepspeed_trainings.build_extensions()


@pytest.fixture(scope="session", params=[pytest.param(master, marks=pytest.mark.spark) for master in MASTERS])
def spark_master(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def spark(spark_master: str, sessions: Sessions) -> Any:
    """A session on this machine's cores, then one with two executors of two cores."""
    return sessions.get(spark_master)


@pytest.fixture
def one_jvm(sessions: Sessions) -> Any:
    """A session whose tasks run in the driver's JVM."""
    return sessions.get(MASTERS[0])


@pytest.fixture
def two_executors(sessions: Sessions) -> Any:
    """A session with two executors of two cores."""
    return sessions.get(MASTERS[-1])


@pytest.fixture(scope="session", params=[LOCAL, pytest.param(MASTERS[-1], marks=pytest.mark.spark)])
def mode(request: pytest.FixtureRequest) -> str:
    """Where a run goes: this machine, or executors. For tasks in the driver's own JVM there is test_spark."""
    return str(request.param)


@pytest.fixture
def local(mode: str, request: pytest.FixtureRequest) -> bool:
    """Whether runs of the mode are on this machine; where not, its session is there."""
    if mode != LOCAL:
        request.getfixturevalue("sessions").get(mode)
    return mode == LOCAL


@pytest.fixture
def make(local: bool) -> Make:
    """Makes a distributor for the mode, on CPUs."""
    return lambda num_processes=2, **options: TorchDistributor(num_processes, local, False, **options)


@pytest.fixture
def make_local() -> Make:
    """Makes a distributor for this machine, on CPUs."""
    return lambda num_processes=2, **options: TorchDistributor(num_processes, True, False, **options)


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver and ranks on its machine look for no GPUs: those that variables name count."""
    monkeypatch.setattr(devices, "list_gpus", lambda: devices.Listing("nobody looks"))
    monkeypatch.setenv(CHECK_GPUS, "0")


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A memory group with a limit of 64 MiB, for who moves into it."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, f"distributor-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / limit).exists():  # no memory groups here, but a folder: nothing would be limited
            group.rmdir()
            continue
        (group / limit).write_text(str(64 << 20))
        yield group
        watch.until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
        return
    pytest.skip("no memory groups can be made here")


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver listens, but nodes are told of a port where nobody is."""
    listen = ChannelServer.listen

    def elsewhere(self: ChannelServer, *args: Any) -> Endpoint:
        return replace(listen(self, *args), host="127.0.0.1", port=1)

    monkeypatch.setattr(ChannelServer, "listen", elsewhere)


@pytest.fixture
def leftovers() -> Leftovers:
    """Tells what is left of the test's runs."""
    return Leftovers()


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What is between executors and the driver of the next run."""
    listen = ChannelServer.listen
    with Proxy("127.0.0.1", 0) as proxy:

        def through_a_wire(self: ChannelServer, *args: Any) -> Endpoint:
            endpoint = listen(self, *args)
            proxy.to = (endpoint.host, endpoint.port)
            return replace(endpoint, host="127.0.0.1", port=proxy.port)

        monkeypatch.setattr(ChannelServer, "listen", through_a_wire)
        yield proxy


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; root is needed to mount it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
