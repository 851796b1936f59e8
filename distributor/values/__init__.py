"""Values that the processes of a run send to each other, such as jobs, plans and messages.

This code runs in all processes of a run. Besides the standard library, it may import only ``distributor.errors`` and
``distributor.text``.
"""
