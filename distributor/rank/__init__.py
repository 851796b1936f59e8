"""The code of a rank.

Runs in ranks and in the launcher; may import ``shipping``, ``machine`` and ``channel``.
"""
