"""Training with DeepSpeed: configurations, ZeRO, tuning, checkpoints and extensions.

This package is a wing, which means that no core package imports it (see docs/architecture.md).
"""
