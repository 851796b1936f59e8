"""Checks users' requests, and starts runs.

Runs on the driver; may import ``run``, ``schedulers``, ``display``, ``launch``, ``shipping`` and ``machine``.
"""
