"""Views of a run for its user. Runs on the driver; may import ``outcomes``."""
