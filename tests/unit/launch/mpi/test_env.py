"""Open MPI's variables, without MPI."""

from __future__ import annotations

from planned import TMP, job, plans

from distributor.launch import MpiEnv
from distributor.launch.assign_ranks import place
from distributor.launch.torchrun import Torchrun
from distributor.values.placement import NodeFacts
from distributor.values.plan import Site


def test_the_mpi_environment_counts_as_torchruns() -> None:
    first, second = plans(MpiEnv())
    assert {name: value for name, value in first.rank_env[1].items() if name.startswith(("OMPI", "AZ_"))} == {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "AZ_BATCH_MASTER_NODE": "10.0.0.1:5000",
        "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.1",
    }
    assert second.rank_env[0]["OMPI_COMM_WORLD_RANK"] == "2"


def test_the_mpi_environment_writes_addresses_as_urls_do() -> None:
    request = job(1, MpiEnv())
    who = place([NodeFacts(0, "a", "host-a", "fd00::1", 5000)], request)
    (env,) = MpiEnv().plan(Site(request, who.shares(whole=False)[0], {}, folder=TMP)).rank_env
    assert (env["AZ_BATCH_MASTER_NODE"], env["AZ_BATCHAI_MPI_MASTER_NODE"]) == ("[fd00::1]:5000", "fd00::1")


def test_only_the_path_of_mpis_variables_sets_them() -> None:
    """Libraries that find Open MPI's variables take them for a start by mpirun."""
    for plan in plans(Torchrun()):
        for env in (plan.node_env, *plan.rank_env):
            assert not [name for name in env if name.startswith(("OMPI_", "PMI", "AZ_", "MPI"))]
