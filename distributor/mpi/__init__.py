"""Ranks with MPI (MPICH or Open MPI): the launch path, the process that starts MPI on each node, and code for ranks.

This package runs on the driver, on nodes and in ranks. It is a wing, which means that no core package imports it (see
docs/architecture.md).
"""
