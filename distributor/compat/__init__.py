"""The wing for users of other launchers: names that they know, on the driver and in ranks."""
