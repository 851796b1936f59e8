"""Names of Databricks' launchers: ``serverless_gpu``, and ``air``, which follows it."""
