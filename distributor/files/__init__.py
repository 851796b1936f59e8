"""Keeps the new files of ranks. Runs on the driver; may import ``channel``, ``machine`` and ``shipping``."""
