"""The code of a rank.

This package runs in ranks and in the launcher, the process that forks them. It may import ``shipping``, ``machine`` and
``channel`` (see docs/architecture.md).
"""
