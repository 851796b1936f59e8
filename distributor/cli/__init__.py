"""The command line. Runs on the driver; only ``distributor.__main__`` imports it."""
