"""Searches for good parameters with Optuna: each trial is a run of its own. Runs on the driver."""
