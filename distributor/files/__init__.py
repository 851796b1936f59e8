"""Collects new files of ranks (from their current directories) in ``output_dir``, a folder on the driver or a URL.

This package runs on the driver. It may import ``channel``, ``machine`` and ``shipping``.
"""
