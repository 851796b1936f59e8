"""Registers a trained model with MLflow: built on the driver, loaded from a checkpoint, and logged to its run."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch

from distributor.checkpoint.loading import load_module
from distributor.text import notices
from distributor.text.wording import without_password
from distributor.tracking.mlflow_files import log_files
from distributor.values.checkpoints import Checkpoints

_log = notices.logger

_FOLDER = "model"  # among the run's artifacts, or model-2 and so on

_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch.export notes its folder in os.environ


@dataclass(frozen=True)
class Registration:
    """Which model is registered, and how it is built."""

    name: str
    build: Callable[[], torch.nn.Module]
    example: Any = None

    def register(self, client: Any, run: str, checkpoints: Checkpoints) -> str:
        """Register the model of the best or last checkpoint, logged to a run by MLflow's id; return its version."""
        module = self.build().to("cpu")
        path = load_module(module, checkpoints)
        module.eval()
        name = _unused(client, run)
        with tempfile.TemporaryDirectory() as folder:
            self._save(module, run, os.path.join(folder, name))
            log_files(client, run, folder)
        version = _add_version(client, self.name, run, name)
        client.set_tag(run, "distributor.registered", f"{self.name} {version}, of {without_password(path)}")
        return version

    def _save(self, module: torch.nn.Module, run: str, folder: str) -> None:
        """Write MLflow's folder of the model: as pt2 if there is an example and it exports, else pickled."""
        if self.example is None:
            _write(module, run, folder, "pickle")
            return
        signature: dict[str, Any] = {}
        noted = _CACHE in os.environ
        try:
            described = _described(module, self.example)
            signature = {"signature": described["signature"]}
            _write(module, run, folder, "pt2", **described)
        except Exception as error:  # of torch.export, of the module itself
            why = str(error).partition("\n")[0][:300]
            _log.warning("MLflow: the model %s does not export, so it is pickled: %s", self.name, why)
            _write(module, run, folder, "pickle", **signature)
        finally:
            if not noted:
                os.environ.pop(_CACHE, None)


def _write(module: torch.nn.Module, run: str, folder: str, form: str, **described: Any) -> None:
    import mlflow
    from mlflow import pytorch
    from mlflow.models import Model

    if "serialization_format" in inspect.signature(pytorch.save_model).parameters:
        described["serialization_format"] = form
    elif form != "pickle":
        raise ValueError(f"MLflow {mlflow.__version__} only pickles")
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as work:
        made = os.path.join(work, _FOLDER)
        model = Model(artifact_path=os.path.basename(folder), run_id=run)
        needs = pytorch.get_default_pip_requirements()  # otherwise, MLflow loads the model in a process of its own
        pytorch.save_model(module, made, mlflow_model=model, pip_requirements=needs, **described)
        os.rename(made, folder)


def _described(module: torch.nn.Module, example: Any) -> dict[str, Any]:
    """Return MLflow's example and signature of a module, given an array or a tensor, or a tuple of them."""
    from mlflow.models import infer_signature

    inputs = [torch.as_tensor(each).detach().cpu() for each in (example if isinstance(example, tuple) else (example,))]
    with torch.inference_mode():
        outputs = _arrays(module(*inputs))
    arrays = [each.numpy() for each in inputs]
    if len(arrays) == 1:
        return {"input_example": arrays[0], "signature": infer_signature(arrays[0], outputs)}
    named = dict(zip(inspect.signature(module.forward).parameters, arrays, strict=False))
    return {"input_example": arrays, "signature": infer_signature(named, outputs)}


def _arrays(outputs: Any) -> Any:
    """Return what a module has returned as MLflow's signatures take it; ``None`` if they do not."""
    if isinstance(outputs, torch.Tensor):
        return outputs.numpy()
    if isinstance(outputs, Mapping) and all(isinstance(each, torch.Tensor) for each in outputs.values()):
        return {name: each.numpy() for name, each in outputs.items()}
    return None


def _unused(client: Any, run: str) -> str:
    """Return a folder for the model that no version has: a training that goes on registers several in one run."""
    taken = {str(each.source).rpartition("/")[2] for each in client.search_model_versions(f"run_id='{run}'")}
    return next(name for name in chain([_FOLDER], (f"{_FOLDER}-{n}" for n in count(2))) if name not in taken)


def _add_version(client: Any, name: str, run: str, folder: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{client.get_run(run).info.artifact_uri.rstrip('/')}/{folder}"
    return str(client.create_model_version(name, source, run).version)
