"""Names of Databricks' launchers: ``serverless_gpu``, and its successor ``air``."""
