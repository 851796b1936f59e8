"""Schedulers, which run a job on this machine or as a barrier-mode Spark job.

On each node, the local scheduler and the Spark scheduler start the same program: the agent, which starts the ranks and
watches them.

This package runs on the driver, except for a few modules of ``spark`` that run in Spark's Python workers. It may import
``hosting``, ``outcomes``, ``channel``, ``shipping``, ``launch`` and ``machine``.
"""
