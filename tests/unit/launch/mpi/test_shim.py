"""What MPI starts in place of a rank, and of a process that ranks spawn."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributor.launch.mpi import shim
from distributor.launch.mpi.programs import SHIM, environment
from distributor.values.environment import NODE_ID

DEADLINE = 60.0


def test_a_shim_whose_rank_is_elsewhere_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTOR_MPI_LINES", f"one {secrets.token_hex(8)}")
    monkeypatch.setattr(shim, "_PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        with pytest.raises(SystemExit, match="rank 1 is not on this machine: two machines may have the same host name"):
            shim.connect(line, 1)


@pytest.fixture
def companion() -> Iterator[tuple[str, socket.socket]]:
    line = f"test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{line}")
        listener.listen()
        listener.settimeout(DEADLINE)
        yield line, listener


def spawn(line: str, folder: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    """The shim of a process that ranks spawn, as MPI starts it."""
    environ = environment({**os.environ, NODE_ID: "7.1", "TMPDIR": "/ranks"}, str(folder), line, {"OMPI_MCA_x": "here"})
    return subprocess.Popen([*SHIM, *words], env={**environ, NODE_ID: "7.0", "OMPI_MCA_x": "node 0's", **variables})


def test_a_spawned_process_has_what_ranks_have(companion: tuple[str, socket.socket], tmp_path: Path) -> None:
    line, listener = companion
    (tmp_path / "rank-0.stdout").write_text("the rank's\n")
    program = (
        "import os, sys; print(os.getcwd(), *map(os.environ.get, ['TMPDIR', 'OMPI_MCA_x', 'DISTRIBUTOR_NODE_ID']), "
        "*(name for name in os.environ if 'DISTRIBUTOR_MPI' in name)); print(sys.argv[1], file=sys.stderr)"
    )
    shims = spawn(line, tmp_path, "tests", sys.executable, "-c", program, "a b")
    with listener.accept()[0] as connection:
        assert json.loads(connection.recv(1 << 16)) == [shims.pid, shlex.join([sys.executable, "-c", program, "a b"])]
        connection.send(b"-")
        assert connection.recv(100) == b"0"
    assert shims.wait(DEADLINE) == 0
    assert (tmp_path / "rank-0.stdout").read_text() == f"the rank's\n{Path('tests').absolute()} /ranks here 7.1\n"
    assert (tmp_path / "rank-0.stderr").read_text() == "a b\n"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["/", "/bin/sh", "-c", "exit 3"], 3, ""),
        (["/", "/bin/sh", "-c", "kill -9 $$"], -9, ""),
        (["/", "/no/such"], 127, "MPI_Comm_spawn cannot start /no/such in /: [Errno 2] No such file"),
        (["/no/such", "true"], 127, "MPI_Comm_spawn cannot start true in /no/such: [Errno 2] No such file"),
    ],
)
def test_a_shim_reports_how_a_spawned_process_has_failed(
    companion: tuple[str, socket.socket], tmp_path: Path, words: list[str], code: int, told: str
) -> None:
    line, listener = companion
    shims = spawn(line, tmp_path, *words)
    with listener.accept()[0] as connection:
        connection.recv(1 << 16)
        connection.send(b"-")
        assert connection.recv(100) == str(code).encode()
    assert shims.wait(DEADLINE) == code & 0xFF
    assert (tmp_path / "rank-0.stderr").read_text().startswith(told)


@pytest.mark.parametrize(("chosen", "expected"), [("/usr", "/usr"), ("/no/such", os.getcwd())])
def test_a_folder_that_a_machine_lacks_is_the_ranks(
    companion: tuple[str, socket.socket], tmp_path: Path, chosen: str, expected: str
) -> None:
    """Open MPI chooses the folder of the rank that spawns."""
    line, listener = companion
    shims = spawn(line, tmp_path, shim.CHOSEN, "/bin/pwd", OMPI_MCA_initial_wdir=chosen)
    with listener.accept()[0] as connection:
        connection.recv(1 << 16)
        connection.send(b"-")
        assert connection.recv(100) == b"0"
    assert shims.wait(DEADLINE) == 0
    assert (tmp_path / "rank-0.stdout").read_text() == f"{expected}\n"
