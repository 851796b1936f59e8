"""JAX: tell JAX in each rank about the other ranks.

A wing (see docs/architecture.md): runs in ranks; may import ``rank.imports``.
"""
