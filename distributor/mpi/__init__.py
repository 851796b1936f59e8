"""Ranks with MPI (MPICH or Open MPI): the launch path, the process that starts MPI on each node, and code for ranks.

This package is a wing, which the core of the library does not import (see docs/architecture.md). It runs on the driver,
on nodes and in ranks.
"""
