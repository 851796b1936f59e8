"""Values that a run's processes send to each other. This code runs in all of them, on the standard library alone."""
