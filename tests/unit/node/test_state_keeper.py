"""The process that keeps states in memory for the next job: it stays when the agent ends, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import watch

from distributor.channel.tls import make_peer_key, server_context
from distributor.machine import folders, state_folders
from distributor.values.checkpoints import PeerKey

RUN = "3f2a0c0ffee1"

#: An agent that ends, and leaves a keeper behind. Its command line is that of an agent.
AGENT = """
import sys
_, part, port, certificate, private, folder, keep = sys.argv
from jobs import make_job
from distributor.channel import connections
from distributor.channel.peers import PeerServer
from distributor.node.state_keeper import StateKeeper
from distributor.values.job import Module

class Server:
    def close(self):
        print("closed", flush=True)

line = connections.connect(("127.0.0.1", int(port), open(certificate).read(), b"token"), 10.0)
job = make_job("3f2a0c0ffee1", 1)
StateKeeper(job, private, folder, Server(), line).end(keep=keep == "keep")
"""


class Driver:
    """What the keeper holds a connection to."""

    def __init__(self, key: PeerKey) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._context = server_context(key.certificate, key.private)
        self.port = self._listener.getsockname()[1]
        self.line: ssl.SSLSocket | None = None

    def accept(self) -> None:
        line, _ = self._listener.accept()
        line.settimeout(watch.DEADLINE)
        self.line = self._context.wrap_socket(line, server_side=True)
        assert self.line.recv(5) == b"token"

    def close(self) -> None:
        if self.line is not None:
            self.line.close()
        self._listener.close()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    key = make_peer_key()
    (tmp_path / "certificate").write_text(key.certificate)
    driver = Driver(key)
    yield driver
    driver.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A node's folder in shared memory, in which a rank has saved once."""
    private = folders.make(RUN)
    folder = Path(state_folders.path_for(private))
    folder.mkdir(mode=0o700)
    (folder / "0-0.record").touch()
    folders.note_elsewhere(private, [str(folder)], to_the_end=True)
    yield folder
    folders.remove(private)


def end(driver: Driver, folder: Path, tmp_path: Path, keep: str = "keep") -> None:
    """An agent ends; its owner removes its folder."""
    at = str(Path(tempfile.gettempdir()) / folder.name)
    arguments = [str(driver.port), str(tmp_path / "certificate"), at, str(folder), keep]
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", AGENT, "agent", *arguments]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True)
    driver.accept()
    told, _ = agent.communicate(timeout=watch.DEADLINE)  # a keeper holds no output of the agent open
    assert (agent.returncode, told) == (0, "closed\n")
    folders.remove(at)


def keeper(folder: Path) -> psutil.Process:
    (found,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if (line := process.info["cmdline"] or []) and str(folder) in line and "keep" in line[3:4]
    )
    return found


def test_states_stay_until_the_run_ends(driver: Driver, folder: Path, tmp_path: Path) -> None:
    end(driver, folder, tmp_path)
    assert (folder / "0-0.record").exists()
    process = keeper(folder)
    driver.close()
    watch.until(lambda: not folder.exists())
    process.wait(watch.DEADLINE)


def test_states_stay_until_a_later_job_has_saved_twice(driver: Driver, folder: Path, tmp_path: Path) -> None:
    end(driver, folder, tmp_path)
    process = keeper(folder)
    later = Path(f"/dev/shm/distributor-{RUN}-1-abcd1234")
    later.mkdir(mode=0o700)
    try:
        (later / "0-0.record").touch()
        enough = time.monotonic() + 1.2
        while time.monotonic() < enough:
            assert folder.exists()
            time.sleep(0.05)
        (later / "0-1.record").touch()
        process.wait(watch.DEADLINE)
        assert not folder.exists()
    finally:
        for path in later.iterdir():
            path.unlink()
        later.rmdir()


def test_a_keeper_that_is_told_to_end_removes_its_folder(driver: Driver, folder: Path, tmp_path: Path) -> None:
    end(driver, folder, tmp_path)
    process = keeper(folder)
    process.terminate()
    process.wait(watch.DEADLINE)
    assert not folder.exists()


def test_the_next_agent_removes_what_a_killed_keeper_leaves(driver: Driver, folder: Path, tmp_path: Path) -> None:
    end(driver, folder, tmp_path)
    process = keeper(folder)
    process.kill()
    process.wait(watch.DEADLINE)
    assert folder.exists()
    folders.remove_stale()
    assert not folder.exists()


@pytest.mark.parametrize("case", ["success", "nothing saved", "the run has ended"])
def test_nothing_stays_if_nobody_needs_it(driver: Driver, folder: Path, tmp_path: Path, case: str) -> None:
    if case == "nothing saved":
        (folder / "0-0.record").unlink()
    if case == "the run has ended":
        accept = driver.accept
        driver.accept = lambda: (accept(), driver.close())  # type: ignore[assignment, method-assign]
    end(driver, folder, tmp_path, "drop" if case == "success" else "keep")
    assert not folder.exists() or case == "the run has ended"
    watch.until(lambda: not folder.exists())
