"""A wing for users of other launchers: names that they know. Runs on the driver; ``horovod.torch`` also in ranks."""
