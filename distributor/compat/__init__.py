"""The functions and classes of other launchers, under the same names: notebooks need to change only their imports.

A wing (see docs/architecture.md): runs on the driver. ``horovod.torch``, Databricks' ``runtime`` and ``ray_init``, and
the preparations of a rank (the check of its GPU, ``as_driver``) run in ranks.
"""
