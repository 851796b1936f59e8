"""What ``mpiexec`` is given, and what it prints."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest

from distributor.launch.mpi import mpich
from distributor.values.environment import NODE_ID


def mpiexec(says: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["/bin/sh", "-c", f"{says}; exit 3"], stdout=subprocess.PIPE, text=True)


def test_commands_of_mpiexec_are_sorted_by_node() -> None:
    says = "printf 'HYDRA_LAUNCH: /a/proxy --proxy-id %d --x \\n' 1 0; echo HYDRA_LAUNCH_END"
    assert mpich.proxies(mpiexec(says), 2) == ["/a/proxy --proxy-id 0 --x ", "/a/proxy --proxy-id 1 --x "]


def test_an_mpiexec_that_ends_early_is_an_error() -> None:
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
