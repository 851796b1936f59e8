"""Checks users' requests, and starts runs.

This code runs on the driver. It may import ``run``, ``schedulers``, ``display``, ``launch``, ``shipping`` and
``machine``. Like all code of ``distributor``, it may also import ``values``, ``text`` and ``errors``.
"""
