"""The functions and classes of Databricks', Azure ML's and Horovod's launchers, under their own names.

A notebook for Databricks, Azure ML or Horovod needs to change only its imports. Most of this package runs on the
driver. These parts run in ranks: ``horovod.torch``, Databricks' ``runtime`` and ``ray_init``, and the code that checks
a rank's GPU or joins a Ray cluster before the user's function begins. No other folder of ``distributor`` imports this
one.
"""
