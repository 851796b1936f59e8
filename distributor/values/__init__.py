"""Values that cross process boundaries.

Runs everywhere; standard library only. May import ``errors`` and ``text``.
"""
