"""What a node's companion and its ranks are told of MPI."""

from __future__ import annotations

from planned import TMP, plans

from distributor.launch import Mpi


def test_ranks_of_mpi_get_their_places_from_the_companion_of_their_node() -> None:
    first, second = plans(Mpi().resolve(3, False))
    (one,), (other,) = first.companions, second.companions
    assert one.arguments == {
        **{"node": 0, "sizes": (2, 1), "hosts": ("host-a", "host-b"), "head": ("10.0.0.1", 6000)},
        **{"folder": TMP, "kind": None},
    }
    assert other.arguments["node"] == 1
    assert first.first is not None and first.last is not None
    lines = one.environment["DISTRIBUTOR_MPI_LINES"].split()  # of each rank, the node's
    assert lines[0] == lines[1] != lines[2]
    assert lines == other.environment["DISTRIBUTOR_MPI_LINES"].split()
    expected = {"line": lines[0], "world_size": 3, "beside": 2, "folder": "/tmp/distributor-run7-x"}
    assert first.first.arguments == expected
    assert one.environment["DISTRIBUTOR_MPI_KEY"] == other.environment["DISTRIBUTOR_MPI_KEY"]
    (another,) = plans(Mpi().resolve(3, False), "a")[0].companions
    assert not {*one.environment.values()} & {*another.environment.values()}
    assert not any(secret in repr(first.companions) for secret in one.environment.values())
