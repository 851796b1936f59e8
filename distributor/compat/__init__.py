"""Names of other launchers, for notebooks that use them. A wing: runs on the driver; ``horovod.torch`` in ranks."""
