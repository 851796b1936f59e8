"""Carries out a run, from its start to its end. This code runs on the driver.

The package's modules may import ``schedulers.base``, ``display``, ``files``, ``outcomes`` and ``channel``.
"""
