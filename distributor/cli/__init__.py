"""The command line. This code runs on the driver, and only ``distributor.__main__`` imports it."""
