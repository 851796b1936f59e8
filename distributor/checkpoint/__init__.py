"""Checkpoints that all ranks commit together.

The code of this package runs in ranks, and in users' own processes outside a run. The package is a wing: the library's
core folders, the rooms, do not import it (see docs/architecture.md).
"""
