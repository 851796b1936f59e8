"""Callbacks that bring a run's reports to trackers: ``Distributor(4, callbacks=[MLflow("/digits")])``."""

from __future__ import annotations

from distributor.tracking.mlflow import MLflow
from distributor.tracking.tensorboard import TensorBoard

__all__ = ["MLflow", "TensorBoard"]
