"""Checks users' requests, and starts runs. This code runs on the driver."""
