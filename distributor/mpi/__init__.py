"""MPI: the launch path, the companion that runs MPI on a node, and functions that ranks call.

A wing (see docs/architecture.md): runs on the driver, on nodes and in ranks.
"""
