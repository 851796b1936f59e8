"""Carries out a run on the driver: a supervisor makes attempts, and an attempt performs what its pure state returns."""
