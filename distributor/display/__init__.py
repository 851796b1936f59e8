"""Shows a run to its user. Runs on the driver; may import ``outcomes``."""
