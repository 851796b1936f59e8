"""The processes of a node: agent (runs the node), launcher (starts the ranks) and warm process (forks agents).

This package runs on nodes. It may import ``rank``, ``launch``, ``channel``, ``shipping`` and ``machine``.
"""
