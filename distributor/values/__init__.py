"""Values that the processes of a run send to each other, such as jobs, plans and messages.

This code runs in all processes of a run, so it uses the standard library only. It may import ``errors`` and ``text``.
"""
