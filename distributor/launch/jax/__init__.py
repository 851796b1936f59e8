"""JAX: ``path`` runs on the driver and on nodes, ``cluster`` in ranks."""
