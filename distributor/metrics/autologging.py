"""Lets what logs to MLflow by itself in a rank make no run beside that of the driver's callback.

On rank 0 it logs to that run, if the driver knew its id when ranks started and the rank's server has it. It does not
end the run, which may go on in another attempt: only the driver knows how a run ends. Otherwise it does nothing: what
Trainers log reaches the run as reports. Calls such as ``mlflow.log_metric`` in users' code stay as they are, and so
does autologging into a run that users' code has started, or that the user's ``MLFLOW_RUN_ID`` names for rank 0.
Sources: ``safe_patch`` of ``mlflow.utils.autologging_utils.safety``, which asks ``autologging_is_disabled`` at each
call, and ``with_managed_run``, which starts a run for it; ``MLflowCallback`` and
``get_reporting_integration_callbacks`` of ``transformers.integrations.integration_utils``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from distributor.machine.imports import on_import
from distributor.metrics import rank as reports

_PATIENCE = 10.0  # seconds that a rank's server has to show that it has the driver's run

_told: set[str] = set()

_run = ""  # MLflow's id of the driver's run, which this rank joins; empty: none

_seen = False  # whether the rank's server has shown the run

_quiet = False  # rank 0 joins the run, so that no other rank need say that it does nothing


def leave_to_driver(run: str, rank: int) -> None:
    """From now on, let ``mlflow.autolog()`` and ``report_to="mlflow"`` log to the driver's run, or else do nothing.

    ``run``: MLflow's id of the driver's run if rank 0 is to join it, or empty. Neither MLflow nor Transformers need be
    imported yet.
    """
    global _run, _quiet
    _run, _quiet = (run, False) if rank == 0 else ("", bool(run))
    on_import("mlflow.utils.autologging_utils", _switch_off)
    on_import("transformers.integrations.integration_utils", _replace_callback)
    if _run:
        on_import("mlflow", _join_in_place)


def is_joined() -> bool:
    """Whether this thread now logs to the driver's run."""
    return bool(_run) and _active() == _run


def _active() -> str | None:
    """Return the id of the run that this rank's code, or autologging, has started."""
    active = getattr(sys.modules.get("mlflow"), "active_run", None)
    run = None if active is None else active()
    return None if run is None else str(run.info.run_id)


def _switch_off(module: Any) -> None:
    is_disabled: Callable[[str], bool] | None = getattr(module, "autologging_is_disabled", None)
    if is_disabled is None:
        return

    @wraps(is_disabled)
    def tell(integration_name: str) -> bool:
        if is_disabled(integration_name) or _run or _has_run():  # MLflow asks while it holds its lock of imports
            return is_disabled(integration_name)
        _tell("mlflow.autolog()")
        return True

    module.autologging_is_disabled = tell


def _join_in_place(mlflow: Any) -> None:
    """Let autologging start the driver's run instead of a new one, and nobody end it."""
    start, client = getattr(mlflow, "start_run", None), getattr(mlflow, "MlflowClient", None)
    end = getattr(client, "set_terminated", None)
    if start is None or client is None or end is None:
        return

    @wraps(start)
    def start_run(*args: Any, **kwargs: Any) -> Any:
        if "mlflow.autologging" not in (kwargs.get("tags") or {}) or _has_run():
            return start(*args, **kwargs)
        if not _can_join():
            _tell("mlflow.autolog()")
            raise LookupError("no run to log to")  # of which MLflow warns, and calls the original function
        return start(run_id=_run, tags=kwargs["tags"])

    @wraps(end)
    def set_terminated(this: Any, run_id: str, *args: Any, **kwargs: Any) -> None:
        if run_id != _run:
            end(this, run_id, *args, **kwargs)

    mlflow.start_run, client.set_terminated = start_run, set_terminated


def _replace_callback(module: Any) -> None:
    callbacks, base = getattr(module, "INTEGRATION_TO_CALLBACK", None), getattr(module, "TrainerCallback", None)
    if not isinstance(callbacks, dict) or "mlflow" not in callbacks or base is None:
        return

    logging = callbacks["mlflow"]

    class JoiningMLflowCallback(base):  # type: ignore[misc, valid-type]
        """Stands for Transformers' MLflowCallback while a Trainer trains; without a run, it does nothing."""

        _logging: Any = None

        def __new__(cls) -> Any:
            return logging() if _has_run() else super().__new__(cls)

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if not (_has_run() or (_can_join() and _join())):
                _tell('report_to="mlflow"')
                return
            self._logging = logging()
            self._logging.on_train_begin(*args, **kwargs)

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            if self._logging is not None:
                self._logging.on_log(*args, **kwargs)

        def on_save(self, *args: Any, **kwargs: Any) -> None:
            if self._logging is not None:
                self._logging.on_save(*args, **kwargs)

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            if self._logging is not None:
                self._logging.on_train_end(*args, **kwargs)
                self._logging = None
                if is_joined():
                    sys.modules["mlflow"].end_run()

    callbacks["mlflow"] = JoiningMLflowCallback


def _has_run() -> bool:
    """Whether this rank's code has started a run of MLflow, or rank 0 is told to join one, which MLflow does once."""
    return ("MLFLOW_RUN_ID" in os.environ and os.environ.get("RANK") == "0") or _active() is not None


def _can_join() -> bool:
    """Whether the rank's server has the driver's run; a server that does not show it soon is not asked again."""
    global _run
    if _run and not _seen:
        with suppress(Exception):  # of the import, or of a store that cannot be opened
            import mlflow

            client = mlflow.MlflowClient()
            thread = threading.Thread(target=_look, args=(client, _run), name="distributor-mlflow", daemon=True)
            thread.start()
            thread.join(_PATIENCE)
        _run = _run if _seen else ""
    return bool(_run)


def _look(client: Any, run: str) -> None:
    global _seen
    with suppress(Exception):  # it is another server, or down
        client.get_run(run)
        _seen = True


def _join() -> bool:
    """Make the driver's run this thread's active one. Not if the code has chosen another experiment."""
    with suppress(Exception):
        sys.modules["mlflow"].start_run(run_id=_run)
    return is_joined()


def _tell(what: str) -> None:
    if not _quiet and what not in _told:
        _told.add(what)
        reports.warn(f"{what} does nothing in ranks: the driver's MLflow callback tracks the run, with all reports")
