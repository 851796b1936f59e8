"""Spark sessions, classic and Connect.

Runs on the driver; ``task``, ``holder`` and ``executor`` run in Spark's Python workers.
"""
