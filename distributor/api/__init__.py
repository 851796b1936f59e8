"""Checks users' requests, and starts runs.

This code runs on the driver. Of this package, it may import ``run``, ``schedulers``, ``display``, ``launch``,
``shipping`` and ``machine``.
"""
