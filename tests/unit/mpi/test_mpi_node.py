"""What a node says where MPICH is missing or ends, and what ranks say to other MPIs."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from distributor.machine import processes
from distributor.mpi import mpich, node, openmpi, rank, shim
from distributor.mpi.places import Places

DEADLINE = 60.0


def test_a_node_takes_mpich_or_open_mpi_or_says_how_to_install_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for kind, told in (
        (None, "neither MPICH nor Open MPI is"),
        ("mpich", "MPICH is not"),
        ("openmpi", "Open MPI is not"),
    ):
        with pytest.raises(SystemExit, match=rf"^{told} installed: there is no \S+ beside \S+/python or on PATH"):
            node.choose(kind)
    (tmp_path / "prterun").touch(0o755)
    assert node.choose(None) == node.choose("openmpi") == "openmpi"
    with pytest.raises(SystemExit, match=r"pip install mpich mpi4py"):
        node.choose("mpich")
    (tmp_path / "mpiexec.hydra").touch(0o755)
    assert node.choose(None) == "mpich"


def mpiexec(says: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["/bin/sh", "-c", f"{says}; exit 3"], stdout=subprocess.PIPE, text=True)


def test_what_mpiexec_says_is_sorted_by_node() -> None:
    says = "printf 'HYDRA_LAUNCH: /a/proxy --proxy-id %d --x \\n' 1 0; echo HYDRA_LAUNCH_END"
    assert mpich.proxies(mpiexec(says), 2) == ["/a/proxy --proxy-id 0 --x ", "/a/proxy --proxy-id 1 --x "]


def test_an_mpiexec_that_ends_is_told() -> None:
    with pytest.raises(
        SystemExit, match="mpiexec ended with code 3 before it printed the commands that start MPI on the nodes"
    ):
        mpich.proxies(mpiexec("true"), 2)


class World:
    """mpi4py, as ranks see it."""

    COMM_WORLD = property(lambda self: self)

    def Get_size(self) -> int:
        return 1

    def Get_library_version(self) -> str:
        return "Open MPI v5.0.11, package\nand more"


def test_ranks_that_another_mpi_leaves_alone_say_so() -> None:
    with pytest.raises(
        RuntimeError, match=r"mpi4py found 1 of 4 ranks: it uses Open MPI v5.0.11, package, but the run has"
    ):
        rank._check(World(), 4)
    rank._check(World(), 1)


@pytest.mark.parametrize(
    ("beside", "given", "expected"),
    [
        (2, {}, {}),
        (3, {}, {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}),
        (
            3,
            {"MPIR_CVAR_POLLS_BEFORE_YIELD": "0"},
            {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "0"},
        ),
    ],
)
def test_more_ranks_than_cpus_yield_unless_the_user_says_otherwise(
    beside: int, given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "cpu_count", lambda: 2)
    monkeypatch.setattr(rank, "on_import", lambda *_: None)
    monkeypatch.setattr(os, "environ", dict(given))
    line = f"test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as companion:
        companion.bind(f"\0{line}")
        companion.listen()

        def give() -> None:
            with companion.accept()[0] as connection:
                assert connection.recv(100) == b"0"
                connection.send(b'{"PMIX_RANK": "0"}')

        place = threading.Thread(target=give)
        place.start()
        rank.join(line, 3, beside, 0)
        place.join()
    assert os.environ.pop("PMIX_RANK") == "0"
    assert {name: value for name, value in os.environ.items() if "YIELD" in name.upper()} == expected


class Shim:
    """Stands for a shim, and for MPICH's process manager behind it."""

    def __init__(self, line: str, number: int) -> None:
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(f"\0{line}")
        self.manager, theirs = socket.socketpair()
        with theirs:
            place = {"PMI_RANK": str(number), "PMI_FD": "9"}
            socket.send_fds(self.line, [json.dumps(place).encode()], [theirs.fileno()])


def ask(line: str, local_rank: int) -> tuple[socket.socket, dict[str, str], socket.socket]:
    """What a rank gets: the line to its companion, its place, and its line to the manager."""
    companion = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    companion.settimeout(DEADLINE)
    companion.connect(f"\0{line}")
    companion.send(str(local_rank).encode())
    told, (descriptor, *_), _, _ = socket.recv_fds(companion, 1 << 16, 1)
    return companion, json.loads(told), socket.socket(fileno=descriptor)


def test_ranks_get_places_by_number_and_speak_to_their_managers() -> None:
    line, failures, ready = f"test-{secrets.token_hex(8)}", [], threading.Event()
    places = Places(line, 2, failures.append)
    threading.Thread(target=places.give, args=(ready.set,), daemon=True).start()
    late, early = Shim(line, 5), Shim(line, 4)
    assert ready.wait(DEADLINE)
    companion, place, pmi = ask(line, 0)
    assert place["PMI_RANK"] == "4"
    pmi.sendall(b"cmd=init\n")
    assert early.manager.recv(100) == b"cmd=init\n"
    early.manager.sendall(b"cmd=response\n")
    assert pmi.recv(100) == b"cmd=response\n"
    pmi.sendall(b"cmd=abort exitcode=7 message=no\n")
    assert companion.recv(100) == b"7"
    for connection in (companion, pmi):
        connection.close()
    other, place, pmi = ask(line, 1)  # the first one's end has been seen, and its manager has not heard of it
    assert place["PMI_RANK"] == "5"
    early.manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        early.manager.recv(100)
    assert not places.over
    late.line.close()
    while not failures:
        pass
    assert failures == [
        "the process that MPI had started in place of a rank has ended, so the rank has lost its connection to MPI"
    ]
    for each in (other, pmi, early.line, early.manager, late.manager):
        each.close()
    while not places.over:
        pass


def test_places_of_open_mpi_need_no_line_to_a_manager() -> None:
    line, ready = f"test-{secrets.token_hex(8)}", threading.Event()
    threading.Thread(target=Places(line, 1, print).give, args=(ready.set,), daemon=True).start()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as shims,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as companion,
    ):
        shims.connect(f"\0{line}")
        shims.send(json.dumps({"OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "x"}).encode())
        assert ready.wait(DEADLINE)
        companion.connect(f"\0{line}")
        companion.send(b"0")
        assert json.loads(companion.recv(1 << 16))["PMIX_NAMESPACE"] == "x"


def test_a_shim_whose_rank_is_elsewhere_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTOR_MPI_LINES", f"one {secrets.token_hex(8)}")
    monkeypatch.setattr(shim, "_PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        with pytest.raises(SystemExit, match="rank 1 is not on this machine: two machines may have the same host name"):
            shim.connect(line, 1)


def test_an_agent_tells_the_command_of_its_hosts_daemon(tmp_path: Path) -> None:
    """``prterun`` runs it with the host, the program with its variables, and quoted arguments."""
    line = f"test-{secrets.token_hex(8)}"
    agent = openmpi._agent(str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{line}-agent")
        listener.listen()
        command = [str(agent), "host-b", "A=1;/x/prted", "--prtemca", "ess", '"env"']
        started = subprocess.Popen(command, env={"DISTRIBUTOR_MPI_LINES": f"{line} other"}, text=True)
        try:
            assert openmpi._hear(listener, started) == ("host-b", '["--prtemca", "ess", "env"]')
        finally:
            started.kill()
            started.wait()


def test_a_prterun_that_ends_is_told() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0test-{secrets.token_hex(8)}")
        listener.listen()
        with pytest.raises(
            SystemExit, match="prterun ended with code 3 before it gave the commands that start MPI on the nodes"
        ):
            openmpi._hear(listener, mpiexec("true"))


def test_the_end_of_a_manager_ends_the_companion_unless_all_ranks_have_ended() -> None:
    for over, expected in ((False, 1), (True, 0)):
        pid = os.fork()
        if pid == 0:
            ended: Any = type("Ended", (), {"over": over})()
            node._await("mpiexec", mpiexec("true"), ended)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected
