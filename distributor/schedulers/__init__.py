"""A scheduler runs a job on this machine or as barrier tasks of Spark. Either way, each node is run by the same agent.

Runs on the driver; ``hosting`` and some modules of ``spark`` also run in Spark's Python workers.
"""
