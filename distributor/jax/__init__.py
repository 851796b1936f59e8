"""The wing for JAX: what ranks tell it about each other. Runs in ranks; may import hooks of `rank`."""
