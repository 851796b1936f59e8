"""Starts agents, the processes that each run one node, and gets their reports.

This package runs in Spark's Python workers and on the driver. It uses the standard library only, and not torch.
"""
