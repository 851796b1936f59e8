"""What a node says where MPICH is missing or ends, and what ranks say to other MPIs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributor.launch.mpi import mpich, node, openmpi, rank, shim
from distributor.launch.mpi.connector import PATIENCE, Places
from distributor.launch.mpi.programs import SHIM, environment
from distributor.machine import processes
from distributor.values.environment import NODE_ID

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


def test_mpiexec_gets_no_variables_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of all nodes would get them, and HYDRA_ENV would keep ranks from spawning any."""
    program = tmp_path / "mpiexec.hydra"
    program.write_text(
        "#!/bin/sh\ncd -P . && /usr/bin/env >&2\npwd >&2\n"
        'echo "HYDRA_LAUNCH: /a/proxy --proxy-id 0"\necho HYDRA_LAUNCH_END\n'
    )
    program.chmod(0o700)
    monkeypatch.setattr(mpich, "find", lambda _: str(program))
    given = {"HYDRA_IFACE": "eth1", "MPIEXEC_PORT_RANGE": "1:2", "HYDRA_ENV": "all", NODE_ID: "7.0", "MARK": "x"}
    with contextlib.redirect_stderr(io.StringIO()) as told:
        started, commands = mpich.begin([1], "127.0.0.1", given, lambda _: None)
    started.communicate()
    assert commands == ["/a/proxy --proxy-id 0"]
    *lines, folder = told.getvalue().splitlines()
    assert {"HYDRA_IFACE=eth1", "MPIEXEC_PORT_RANGE=1:2", f"{NODE_ID}=7.0"} <= {*lines}
    assert not re.search("HYDRA_ENV|MARK", told.getvalue())
    assert folder == "/"


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
    line, ready = f"test-{secrets.token_hex(8)}", threading.Event()
    failures: list[tuple[str, float]] = []
    places = Places(line, 2, "", lambda *failure: failures.append(failure))
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
        (
            "the process that MPI had started in place of a rank has ended, so the rank has lost its connection to MPI",
            PATIENCE,
        )
    ]
    for each in (other, pmi, early.line, early.manager, late.manager):
        each.close()
    while not places.over:
        pass


class Spawned(Shim):
    """Stands for the shim of a process that ranks spawn, for this process, and for MPICH's process manager behind it.

    Args:
        line: name of the companion's socket.
        command: the command of the process.
    """

    def __init__(self, line: str, command: str) -> None:
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(f"\0{line}")
        self.manager, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.line, [json.dumps([os.getpid(), command]).encode()], [theirs.fileno()])
        _, (descriptor, *_), _, _ = socket.recv_fds(self.line, 1, 1)
        self.process = socket.socket(fileno=descriptor)
        for each in (self.line, self.manager, self.process):
            each.settimeout(DEADLINE)


@pytest.fixture
def serving() -> Iterator[tuple[str, list[tuple[str, float]], Shim]]:
    """A companion with one rank: the name of its socket, what it reports, and the rank's shim."""
    line, ready = f"test-{secrets.token_hex(8)}", threading.Event()
    failures: list[tuple[str, float]] = []
    places = Places(line, 1, "", lambda *failure: failures.append(failure))
    threading.Thread(target=places.give, args=(ready.set,), daemon=True).start()
    rank_shim = Shim(line, 0)
    assert ready.wait(DEADLINE)
    yield line, failures, rank_shim


Serving = tuple[str, list[tuple[str, float]], Shim]


def test_a_rank_spawns_processes_through_shims(serving: Serving) -> None:
    line, _, shims = serving
    _, _, pmi = ask(line, 0)
    part = "mcmd=spawn\nnprocs=2\nexecname=%s\ntotspawns=2\nspawnssofar=%d\nargcnt=1\narg1=a b\ninfo_num=0\nendcmd\n"
    request = part.encode() % (b"one", 1) + part.encode() % (b"two", 2)
    pmi.sendall(request[:30])
    for _ in range(2):  # after the second answer, the first bytes have been read
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(f"\0{line}")
            other.send(b"wait")
            assert other.recv(1) == b""
    pmi.sendall(request[30:])
    told = b""
    while told.count(b"endcmd\n") < 2:
        told += shims.manager.recv(1 << 16)
    sh = "\n".join(f"arg{number}={word}" for number, word in enumerate([*SHIM[1:], "."], 1))
    for number, name in ((1, "one"), (2, "two")):
        assert f"spawnssofar={number}\nargcnt=6\n{sh}\narg5={name}\narg1=a b\n" in told.decode()
    assert told.count(b"execname=/bin/sh\n") == 2


def test_a_spawned_process_speaks_to_its_manager_until_its_shim_ends(serving: Serving) -> None:
    line, failures, _ = serving
    spawned = Spawned(line, "work")
    spawned.process.sendall(b"cmd=init\n")
    assert spawned.manager.recv(100) == b"cmd=init\n"
    spawned.process.sendall(b"cmd=get kvsname=x key=PMI_hwloc_xmlfile\n")
    assert spawned.process.recv(100) == b"cmd=get_result rc=1\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank_at_its_end:
        rank_at_its_end.connect(f"\0{line}")
        rank_at_its_end.send(b"wait")
        spawned.process.close()
        spawned.manager.setblocking(False)
        with pytest.raises(BlockingIOError):  # the manager would kill the shim, which could not report a failure
            spawned.manager.recv(100)
        with pytest.raises(BlockingIOError):
            rank_at_its_end.recv(1, socket.MSG_DONTWAIT)
        spawned.line.send(b"0")
        spawned.manager.settimeout(DEADLINE)
        assert spawned.manager.recv(100) == b""
        rank_at_its_end.settimeout(DEADLINE)
        assert rank_at_its_end.recv(1) == b""
    assert failures == []


@pytest.mark.parametrize(
    ("fails", "how"),
    [
        (lambda spawned: spawned.line.send(b"3"), "ended with code 3"),
        (lambda spawned: spawned.line.send(b"-9"), "was killed by SIGKILL"),
        (lambda spawned: spawned.line.close(), "was lost"),
        (lambda spawned: spawned.process.sendall(b"cmd=abort exitcode=7\n"), "called MPI_Abort(7)"),
    ],
)
def test_a_spawned_process_that_fails_is_told(serving: Serving, fails: Callable[[Spawned], Any], how: str) -> None:
    line, failures, _ = serving
    spawned = Spawned(line, "work hard")
    fails(spawned)
    while not failures:
        pass
    assert failures == [(f"a process that MPI_Comm_spawn had started {how}: work hard", 0.0)]


def test_places_of_open_mpi_need_no_line_to_a_manager() -> None:
    line, ready = f"test-{secrets.token_hex(8)}", threading.Event()
    threading.Thread(target=Places(line, 1, "", print).give, args=(ready.set,), daemon=True).start()
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
def test_a_spawned_process_that_fails_says_how(
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
