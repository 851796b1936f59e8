"""Checks of what users ask for, and the start of runs.

Runs on the driver; may import ``run``, ``schedulers``, ``display``, ``launch``, ``shipping`` and ``machine``.
"""
