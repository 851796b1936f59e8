"""Inside one rank. Runs there and in the launcher; may import ``shipping``, ``machine`` and ``channel``."""
