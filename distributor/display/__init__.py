"""What people see of a run. Runs on the driver; may import ``outcomes``."""
