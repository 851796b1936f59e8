"""JAX: tell JAX in each rank about the other ranks.

This package runs in ranks, and may import ``rank.imports``. It is a wing, which means that no core package imports it
(see docs/architecture.md).
"""
