"""Starts agents and gets their reports. An agent is the process that runs one node.

This package runs in Spark's Python workers and on the driver. It uses the standard library only, and not torch.
"""
