"""The wing for MPI: the launch path as users write it (driver), the companion that runs MPICH on a node, and ranks."""
