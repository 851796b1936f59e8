"""The wing for MPI: the launch path as users write it (driver), the companion that runs an MPI on a node, and ranks."""
