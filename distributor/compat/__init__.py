"""Names of other launchers, for notebooks that use them.

A wing (see docs/architecture.md): runs on the driver, except that ``horovod.torch`` runs in ranks.
"""
