"""Spark sessions, classic and Connect. Runs on the driver; ``task`` and ``executor`` run in Spark's Python workers."""
