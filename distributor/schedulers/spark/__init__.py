"""Spark sessions, classic and Connect. Runs on the driver; ``task`` and ``executor`` in Spark's Python workers."""
