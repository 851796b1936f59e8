"""Collects new files of ranks (from their current directories) in ``output_dir``, a folder on the driver or a URL.

The module ``tenure`` has another task: it reserves a run's name. This package runs on the driver. It may import
``channel``, ``machine`` and ``shipping``.
"""
