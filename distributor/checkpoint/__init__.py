"""Checkpoints that all ranks commit together. A wing: it runs in ranks, and in users' own processes outside a run."""
