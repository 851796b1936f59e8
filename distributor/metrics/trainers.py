"""Report what Transformers' Trainer and Lightning's Trainer log, and the steps that they have reached.

Sources: ``DEFAULT_CALLBACKS`` of ``transformers.trainer``; of pytorch-lightning 2.6, ``_LoggerConnector.log_metrics``,
which passes to the loggers everything that a module logs, and ``_call_callback_hooks`` of ``trainer/call.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any

from distributor.errors import ConfigurationError
from distributor.machine.imports import on_import
from distributor.metrics import autologging, rank as reports

_LIGHTNING = ("pytorch_lightning", "lightning.pytorch")

_INTERVAL = 1.0  # seconds between reports of steps for which a Trainer logs nothing


def watch() -> None:
    """Report what these Trainers log from now on. They need not be imported yet."""
    on_import("transformers.trainer", _watch_transformers)
    for package in _LIGHTNING:
        on_import(f"{package}.trainer.connectors.logger_connector.logger_connector", _watch_lightning)
        on_import(f"{package}.trainer.call", _watch_steps)


def _watch_transformers(module: Any) -> None:
    callbacks, base = getattr(module, "DEFAULT_CALLBACKS", None), getattr(module, "TrainerCallback", None)
    if not isinstance(callbacks, list) or base is None:
        return  # another version, for which users call report() themselves

    class ReportCallback(base):  # type: ignore[misc, valid-type]
        """Reports what Transformers' Trainer logs, and the steps that it has reached."""

        _last = -math.inf

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero and (now := time.monotonic()) - self._last >= _INTERVAL:
                self._last = now
                _report({}, state.global_step, state.max_steps or None)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            _report(logs or {}, state.global_step, state.max_steps or None)  # 0: it evaluates, and never trained

    callbacks.append(ReportCallback)


def _watch_lightning(module: Any) -> None:
    connector = getattr(module, "_LoggerConnector", None)
    log: Callable[..., None] | None = getattr(connector, "log_metrics", None)
    if connector is None or log is None:
        return

    @wraps(log)
    def reported(this: Any, metrics: Any, step: int | None = None) -> None:
        with suppress(Exception):  # a private part of Lightning, which may change
            if metrics:
                _report(metrics, step or this.trainer.global_step, _total(this.trainer))
        log(this, metrics, step)

    connector.log_metrics = reported


def _watch_steps(module: Any) -> None:
    call: Callable[..., None] | None = getattr(module, "_call_callback_hooks", None)
    if call is None:
        return
    last = -math.inf

    @wraps(call)
    def reported(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
        nonlocal last
        with suppress(Exception):  # a private part of Lightning, which may change
            is_due = hook_name == "on_train_batch_end" and time.monotonic() - last >= _INTERVAL
            if trainer.is_global_zero and trainer.global_step and (is_due or hook_name == "on_train_end"):
                last = time.monotonic()
                _report({}, trainer.global_step, _total(trainer))
        call(trainer, hook_name, *args, **kwargs)

    module._call_callback_hooks = reported


def _total(trainer: Any) -> int | None:
    """Return Lightning's total number of steps; ``None`` if it is infinite or not known yet."""
    if trainer.train_dataloader is None:
        return None
    steps = trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) and steps > 0 else None


def _report(logs: Mapping[Any, Any], step: int, total: int | None) -> None:
    """Report those of the values that are numbers."""
    numbers: dict[str, float] = {}
    for name, value in logs.items():
        with suppress(TypeError, ValueError, RuntimeError):  # not numbers, such as tensors of several elements
            numbers[str(name)] = float(value)
    try:
        reports.add(numbers, step, total, tracked=bool(numbers) and autologging.is_joined())
    except ConfigurationError as error:  # a report that is too long must not end a training that never made one
        reports.warn(f"what a Trainer has logged is left out: {error}")
