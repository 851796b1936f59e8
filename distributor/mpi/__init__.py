"""The wing for MPI: the launch path (driver), the companion that runs MPI on a node, and functions that ranks call."""
