"""Checks users' requests, and starts runs.

This code runs on the driver. Of ``distributor``, it may import ``run``, ``schedulers``, ``display``, ``launch``,
``shipping`` and ``machine``, and like all code ``values``, ``text`` and ``errors``.
"""
