"""The functions and classes of Databricks' and Azure ML's launchers, under their own names.

Notebooks for Databricks change their imports; those for Azure ML also call ``run``. Most of this runs on the driver; in
ranks run ``runtime``, ``ray_init``, the check of a GPU, and what joins Ray's cluster. No other folder imports this one.
"""
