"""All ranks stop at one step: the driver proposes it, each node accepts, ranks wait there for the decision.

``driver``, ``node`` and ``rank`` run in these processes, ``vote_file`` in the last two.
"""
