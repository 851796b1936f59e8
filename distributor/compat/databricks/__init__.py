"""Databricks' launchers, whose functions have the same names here: ``serverless_gpu``, and its successor ``air``."""
