"""The functions and classes of Databricks', Azure ML's and Horovod's launchers, under their own names.

Notebooks that use these launchers need to change only their imports. Most of this package runs on the driver.
``horovod.torch``, Databricks' ``runtime`` and ``ray_init``, and what a rank does before the user's function begins (it
checks its GPU, or joins a Ray cluster) run in ranks. A wing: no other folder of the package imports this one.
"""
