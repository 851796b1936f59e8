"""The scheduler that runs a job through a Spark session, classic or Connect.

This package runs on the driver; its modules ``task``, ``holder`` and ``executor`` run in Spark's Python workers.
"""
