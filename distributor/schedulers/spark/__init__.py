"""Runs a job through a Spark session, classic or Connect.

``task`` and ``executor`` run in Spark's Python workers, all other modules on the driver.
"""
