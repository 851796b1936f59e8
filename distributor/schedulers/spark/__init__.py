"""The scheduler that runs a job through a Spark session, classic or Connect.

The modules ``task``, ``holder`` and ``executor`` run in Spark's Python workers, all other modules on the driver.
"""
