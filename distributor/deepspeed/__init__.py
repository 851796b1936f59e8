"""Training with DeepSpeed: configurations, ZeRO, tuning, checkpoints and extensions.

The package is a wing: the library's core folders, the rooms, do not import it (see docs/architecture.md).
"""
