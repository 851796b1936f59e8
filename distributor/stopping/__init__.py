"""All ranks stop at one step. ``driver``, ``node`` and ``rank`` run in these processes, ``board`` in the last two."""
