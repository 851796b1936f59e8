"""Keeps the files that ranks write during a run in ``output_dir``, which is a folder on the driver or a URL.

This package runs on the driver. It may import ``channel``, ``machine`` and ``shipping``.
"""
