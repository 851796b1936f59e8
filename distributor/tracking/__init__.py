"""Remembers runs, and brings what they report to MLflow and TensorBoard. Runs on the driver."""
