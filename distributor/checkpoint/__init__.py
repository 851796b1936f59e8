"""Checkpoints that all ranks commit together.

A wing (see docs/architecture.md): it runs in ranks, and in users' own processes outside a run.
"""
