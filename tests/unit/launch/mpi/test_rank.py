"""How a rank joins MPI."""

from __future__ import annotations

import os
import secrets
import socket
import threading

import pytest

from distributor.launch.mpi import rank
from distributor.machine import processes

DEADLINE = 60.0


class World:
    """mpi4py, as ranks see it."""

    COMM_WORLD = property(lambda self: self)

    def Get_size(self) -> int:
        return 1

    def Get_library_version(self) -> str:
        return "Open MPI v5.0.11, package\nand more"


def test_a_rank_that_finds_too_few_ranks_names_its_mpi() -> None:
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
    monkeypatch.setattr(rank, "around_import", lambda *_: None)
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
        rank.join(line, 3, beside, "/", 0)
        place.join()
    assert os.environ.pop("PMIX_RANK") == "0"
    assert {name: value for name, value in os.environ.items() if "YIELD" in name.upper()} == expected
