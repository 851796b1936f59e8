"""To which server files go, with stand-ins for the classes of MLflow 2 and 3."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from distributor.tracking.mlflow_files import log_files

SERVER = "http://tracking:5000"


class Proxied2:
    def __init__(self, artifact_uri: str) -> None: ...

    @classmethod
    def resolve_uri(cls, artifact_uri: str, tracking_uri: str) -> str:
        return f"{tracking_uri}/{artifact_uri.removeprefix('mlflow-artifacts:/')}"


class Proxied3(Proxied2):
    def __init__(self, artifact_uri: str, tracking_uri: str | None = None) -> None: ...


@pytest.mark.parametrize(
    ("proxied", "place", "expected"),
    [
        (Proxied2, "mlflow-artifacts:/1/abc", (f"{SERVER}/1/abc", "folder", "logs")),
        (Proxied2, "s3://bucket/1/abc", ("client", "abc", "folder", "logs")),
        (Proxied3, "mlflow-artifacts:/1/abc", ("client", "abc", "folder", "logs")),
    ],
)
def test_files_go_to_the_clients_server(
    proxied: type, place: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[str, ...]] = []

    class Http:
        def __init__(self, uri: str) -> None:
            self.uri = uri

        def log_artifacts(self, *arguments: str) -> None:
            logged.append((self.uri, *arguments))

    for name, found in (("http", {"HttpArtifactRepository": Http}), ("mlflow", {"MlflowArtifactsRepository": proxied})):
        module = ModuleType(name)
        vars(module).update(found)
        suffix = "artifact_repo" if name == "http" else "artifacts_repo"
        monkeypatch.setitem(sys.modules, f"mlflow.store.artifact.{name}_{suffix}", module)
    for name in ("mlflow", "mlflow.store", "mlflow.store.artifact"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    client: Any = SimpleNamespace(
        tracking_uri=SERVER,
        get_run=lambda run: SimpleNamespace(info=SimpleNamespace(artifact_uri=place)),
        log_artifacts=lambda *arguments: logged.append(("client", *arguments)),
    )
    log_files(client, "abc", "folder", "logs")
    assert logged == [expected]
