"""MPI: ``path`` runs on the driver and on nodes, ``node`` beside ranks, ``rank`` in them, ``shim`` as MPI's process."""
