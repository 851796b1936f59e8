"""The processes of a node: agent, launcher and warm process.

Runs on nodes; may import ``rank``, ``launch``, ``channel``, ``shipping`` and ``machine``.
"""
