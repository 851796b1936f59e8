"""Which MPI a node takes, and what the end of its manager does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distributor.launch.mpi import node


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


def test_the_end_of_a_manager_ends_the_companion_unless_all_ranks_have_ended() -> None:
    for over, expected in ((False, 1), (True, 0)):
        pid = os.fork()
        if pid == 0:
            ended: Any = type("Ended", (), {"over": over})()
            node._await("mpiexec", mpiexec("true"), ended)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected
