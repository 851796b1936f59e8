"""The processes of a node: agent, launcher and warm process.

This package runs on nodes. It may import ``rank``, ``launch``, ``channel``, ``shipping`` and ``machine``.
"""
