"""MPI: the launch path, the process that runs MPI on each node beside the ranks, and functions that ranks call.

This package is a wing, which the core of the library does not import (see docs/architecture.md). It runs on the driver,
on nodes and in ranks.
"""
