"""Callbacks that bring a run's reports to trackers: ``Distributor(4, callbacks=[TensorBoard("logs")])``."""

from __future__ import annotations

from distributor.tracking.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
