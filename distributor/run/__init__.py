"""The life of a run, from its start to its end.

Runs on the driver; may import ``schedulers.base``, ``display``, ``files``, ``outcomes`` and ``channel``.
"""
