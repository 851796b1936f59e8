"""Where a job runs: on this machine, or as one barrier-mode Spark job. Both end in the same agent.

Runs on the driver; may import ``hosting``, ``outcomes``, ``channel``, ``shipping``, ``launch`` and ``machine``.
"""
