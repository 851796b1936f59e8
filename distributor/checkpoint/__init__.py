"""Checkpoints that all ranks commit together.

The code of this package runs in ranks, and in users' own processes outside a run. The package is a wing, which means
that no core package imports it (see docs/architecture.md).
"""
