"""Checkpoints that all ranks commit together. Runs in ranks, and in users' own processes outside a run."""
