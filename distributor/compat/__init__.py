"""The functions and classes of Databricks', Azure ML's and Horovod's launchers, under their own names.

Most notebooks for Databricks or Horovod need to change only their imports. Those for Azure ML also need to call ``run``
to start a job. Most of this package runs on the driver. These parts run in ranks: ``horovod.torch``, Databricks'
``runtime`` and ``ray_init``, and the code that checks a rank's GPU or joins a Ray cluster before the user's function
begins. No other folder of ``distributor`` imports this one.
"""
