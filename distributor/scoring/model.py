"""Runs in a process of the model: loads it, and computes outputs of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distributor.scoring.halving import halved, joined
from distributor.scoring.wire import ScoreAnswer, ScoreRequest

Score = Callable[[dict[str, Any]], Any]


def load_module(build: Callable[[], torch.nn.Module], place: str, folder: str) -> torch.nn.Module:
    """Build a module, and load the entry ``model`` of one checkpoint of a folder or URL."""
    from distributor.checkpoint.loading import load_committed

    module = build()
    load_committed({"model": module}, place, folder)
    return module


def scoring(loaded: Any) -> Score:
    """Return what computes a batch. TypeError: the loader has returned nothing of this kind."""
    if isinstance(loaded, torch.nn.Module):
        module = loaded.eval()
        return lambda batch: module(*batch.values()) if len(batch) == 1 else module(**batch)
    if not callable(loaded):
        raise TypeError(f"the loader must return a module or a function of a batch, not {type(loaded).__name__}")
    score: Score = loaded
    return score


def answer(score: Score, request: ScoreRequest) -> ScoreAnswer:
    """Compute the outputs of a request's rows, batch after batch."""
    failed: dict[int, str] = {}
    done: list[tuple[Any, ...]] = []

    def compute(first: int, last: int) -> tuple[Any, int]:
        rows = request.batch_rows if request.pads else last - first
        batch = {name: _tensor(_padded(values[first:last], rows)) for name, values in request.inputs.items()}
        return score(batch), last - first

    with torch.inference_mode():
        for first in range(0, request.rows, request.batch_rows):
            last = min(first + request.batch_rows, request.rows)
            try:
                for returned, rows in halved(compute, first, last, failed, all_rows=request.skips):
                    length = request.batch_rows if request.pads else rows
                    done.append(tuple(each[:rows] for each in _checked(returned, request.outputs, length)))
            except _ShapeError as error:
                return ScoreAnswer(error=str(error))
            if failed and not request.skips:
                return ScoreAnswer(failed=failed)
    return ScoreAnswer(
        tuple(joined([each[position] for each in done]) for position in range(len(request.outputs))), failed
    )


class _ShapeError(Exception):
    """What the model returned is no output."""


def _padded(values: Any, rows: int) -> Any:
    """Return values with the last one repeated up to a number of rows."""
    if (missing := rows - len(values)) <= 0:
        return values
    if isinstance(values, np.ndarray):
        return np.concatenate([values, np.repeat(values[-1:], missing, axis=0)])
    return [*values, *values[-1:] * missing]


def _tensor(values: Any) -> Any:
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def _checked(returned: Any, names: Sequence[str], rows: int) -> tuple[Any, ...]:
    """Return one value for each output, which is as long as the batch."""
    if isinstance(returned, Mapping):
        if missing := [name for name in names if name not in returned]:
            raise _ShapeError(f"the model returned {list(returned)}, without the output {missing[0]!r}")
        values = [returned[name] for name in names]
    else:
        values = list(returned) if isinstance(returned, tuple) else [returned]
        if len(values) != len(names):
            raise _ShapeError(f"the model returned {len(values)} values for the outputs {', '.join(names)}")
    return tuple(_value(name, value, rows) for name, value in zip(names, values))


def _value(name: str, value: Any, rows: int) -> Any:
    value = _plain(value)
    if not isinstance(value, (np.ndarray, list)):
        raise _ShapeError(f"the output {name!r} must be a tensor, an array or a list, not {type(value).__name__}")
    length = len(value) if isinstance(value, list) or value.ndim else 0
    if length != rows:
        shape = f"of shape {list(value.shape)}" if isinstance(value, np.ndarray) else f"of length {length}"
        raise _ShapeError(
            f"the output {name!r} of {rows} rows is {shape}: the model must return one value for each row"
        )
    return value


def _plain(value: Any) -> Any:
    """Return tensors as arrays, also those in lists: a Spark task may lack torch."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu")
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return [_plain(each) for each in value] if isinstance(value, list) else value
