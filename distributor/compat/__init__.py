"""The functions and classes of Databricks', Azure ML's and Horovod's launchers, under their own names.

A notebook for Databricks, Azure ML or Horovod needs to change only its imports. Most of this package runs on the
driver. ``horovod.torch``, Databricks' ``runtime`` and ``ray_init``, and what a rank does before the user's function
begins (it checks its GPU, or joins a Ray cluster) run in ranks. No other folder of ``distributor`` imports this one.
"""
