"""Shows a run to its user. This code runs on the driver."""
