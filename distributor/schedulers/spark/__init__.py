"""The scheduler that runs a job through a Spark session, classic or Connect.

Runs on the driver; ``task``, ``holder`` and ``executor`` run in Spark's Python workers.
"""
