"""Logs files to a run of MLflow, by clients of MLflow 2 too."""

from __future__ import annotations

import inspect
from typing import Any


def log_files(client: Any, run: str, folder: str, path: str | None = None) -> None:
    """Log a folder's content. MLflow 2 would take the server that the process has set, which may be another."""
    from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
    from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository as Proxied

    place = str(client.get_run(run).info.artifact_uri)
    if place.startswith("mlflow-artifacts:") and "tracking_uri" not in inspect.signature(Proxied).parameters:
        HttpArtifactRepository(Proxied.resolve_uri(place, client.tracking_uri)).log_artifacts(folder, path)
    else:
        client.log_artifacts(run, folder, path)
