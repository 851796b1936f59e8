"""The hosts themselves: that they are apart, and that nothing of them stays."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from pathlib import Path

import programs
import psutil
import pytest
import trainings
import watch
from hosts import Hosts, require
from sessions import Sessions

from distributor import TorchDistributor

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(autouse=True, scope="module")
def _possible() -> None:
    require()


def left(name: str) -> list[object]:
    """Whatever there is of some hosts, looked for in other ways than they are removed."""
    found: list[object] = [*Path("/sys/class/net").glob(f"*{name.removeprefix('hosts')}*")]
    for place in ("/run/netns", "/etc/netns", tempfile.gettempdir()):
        found += Path(place).glob(f"*{name}*")
    for process in psutil.process_iter():
        try:
            if name in process.environ().get("TMPDIR", ""):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_a_collective_over_two_hosts(cluster: Hosts) -> None:
    cluster.session()
    run = TorchDistributor(4, use_gpu=False).submit(trainings.all_reduce)
    assert run.results() == [10.0] * 4
    assert run.placement is not None
    assert {node.host: node.address for node in run.placement.nodes} == cluster.addresses
    assert [len(node.ranks) for node in run.placement.nodes] == [2, 2]


@pytest.mark.long
def test_leaving_leaves_nothing(sessions: Sessions) -> None:
    """Not even of a host that was cut while it ran something with a life of its own."""

    def start_sleeper(_: int) -> int:
        return subprocess.Popen(["sleep", "600"], start_new_session=True, env={}).pid

    sessions.stop()
    with Hosts() as hosts:
        sleepers = hosts.session().sparkContext.parallelize(range(4), 4).map(start_sleeper).collect()
        running = [pid for name in hosts.addresses for pid in hosts.processes(name)]
        assert set(sleepers) < set(running)
        hosts.cut("host-b")
    watch.until(lambda: not any(psutil.pid_exists(pid) for pid in running))
    assert left(hosts.name) == []


@pytest.mark.long
def test_a_start_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    code = """
        import time
        from hosts import Hosts
        with Hosts() as hosts:
            print(hosts.name, flush=True)
            time.sleep(600)
    """
    with programs.start(tmp_path, code, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        owner.send_signal(signal.SIGKILL)
    assert left(name) != []
    with Hosts():
        assert left(name) == []
