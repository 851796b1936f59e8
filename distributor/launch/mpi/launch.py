"""``Mpi``, the class with which users select the MPI launch path."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from distributor.errors import ConfigurationError
from distributor.launch.mpi.path import MpiNodes


@dataclass(frozen=True)
class Mpi:
    """The launch path for code that calls MPI, for example with mpi4py.

    ``COMM_WORLD`` contains the run's ranks, in rank order. MPICH or Open MPI 5 must be installed on each node
    (``pip install mpich mpi4py``). MPI's own process manager connects the ranks, without ssh. Ranks are started as on
    the other launch paths, and have torchrun's environment variables too, so the same code may use
    ``torch.distributed``.

    Args:
        implementation: ``"mpich"`` or ``"openmpi"``. ``None`` (default): the implementation that node 0 has; MPICH if
            node 0 has both.

    Example:
        >>> from distributor import Distributor
        >>> def train():
        ...     from mpi4py import MPI
        ...     return MPI.COMM_WORLD.allreduce(1)
        >>> Distributor(8, launch=Mpi()).run(train)  # doctest: +SKIP
        8
    """

    implementation: str | None = None

    def resolve(self, num_processes: int, use_gpu: bool) -> MpiNodes:
        """Check ``implementation``, and return the launch path that becomes part of the job.

        Raises:
            ConfigurationError: ``implementation`` is unknown.
        """
        if self.implementation not in (None, "mpich", "openmpi"):
            raise ConfigurationError(f"implementation must be 'mpich' or 'openmpi', not {self.implementation!r}")
        return MpiNodes(secrets.token_hex(16), self.implementation)
