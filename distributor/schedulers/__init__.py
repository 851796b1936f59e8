"""Schedulers, which run a job on this machine or as a barrier-mode Spark job.

The local scheduler and the Spark scheduler start the same agent on each node: a process that starts the ranks and
watches them.

This package runs on the driver. It may import ``hosting``, ``outcomes``, ``channel``, ``shipping``, ``launch`` and
``machine``.
"""
