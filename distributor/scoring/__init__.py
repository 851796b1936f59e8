"""Scores a DataFrame with a model that each executor loads once. Runs on the driver, in Spark tasks, and in the
processes of the model."""
