"""One node's life: agent, launcher, warm process.

Runs on nodes; may import ``rank``, ``launch``, ``channel``, ``shipping`` and ``machine``.
"""
