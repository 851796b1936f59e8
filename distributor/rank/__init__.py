"""The code of a rank.

It runs in ranks and in the launcher, the process that forks them. It may import ``shipping``, ``machine`` and
``channel`` (see docs/architecture.md).
"""
