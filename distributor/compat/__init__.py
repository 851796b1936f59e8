"""The functions and classes of Databricks' and Azure ML's launchers, under their own names.

Most notebooks for Databricks need to change only their imports. Those for Azure ML also call ``run`` to start a job.
Most of this package runs on the driver. In ranks run Databricks' ``runtime`` and ``ray_init``, the check of a rank's
GPU, and what joins a Ray cluster before the user's function. No other folder of ``distributor`` imports this one.
"""
