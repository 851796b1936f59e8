"""Databricks' launcher ``serverless_gpu`` and its successor ``air``. Their functions have the same names here."""
