"""Checkpoints that all ranks commit together.

This package is a wing: no room imports it (see docs/architecture.md). It runs in ranks, and in users' own processes
outside a run.
"""
