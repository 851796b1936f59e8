"""Carries out a run on the driver, from its start to its end.

The package's modules may import ``schedulers.base``, ``display``, ``files``, ``outcomes`` and ``channel``.
"""
