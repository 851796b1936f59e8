"""The places where a job can run: this machine, or one barrier-mode Spark job. Both use the same agent.

Runs on the driver; may import ``hosting``, ``outcomes``, ``channel``, ``shipping``, ``launch`` and ``machine``.
"""
