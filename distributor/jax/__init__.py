"""The wing for JAX: how ranks tell JAX about each other. Runs in ranks; may import the hooks of ``rank``."""
