"""Runs in a process of the model: loads it, and computes outputs of rows."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distributor.scoring.wire import ScoreAnswer, ScoreRequest

Score = Callable[[dict[str, Any]], Any]


def load_module(build: Callable[[], torch.nn.Module], folder: str) -> torch.nn.Module:
    """Build a module, and load the entry ``model`` of the last checkpoint in a folder or at a URL."""
    from distributor.checkpoint.loading import load_checkpoint

    module = build()
    load_checkpoint({"model": module}, folder=folder)
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
    with torch.inference_mode():
        for first in range(0, request.rows, request.batch_rows):
            last = min(first + request.batch_rows, request.rows)
            try:
                done += _outputs(score, request, first, last, failed)
            except _RowError as error:
                return ScoreAnswer(failed={error.row: str(error)})
            except _ShapeError as error:
                return ScoreAnswer(error=str(error))
    return ScoreAnswer(
        tuple(_joined([each[position] for each in done]) for position in range(len(request.outputs))), failed
    )


class _RowError(Exception):
    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row = row


class _ShapeError(Exception):
    """What the model returned is no output."""


def _outputs(
    score: Score, request: ScoreRequest, first: int, last: int, failed: dict[int, str]
) -> list[tuple[Any, ...]]:
    """Compute rows together; if that fails, in halves, down to the row at fault."""
    batch = {name: _tensor(values[first:last]) for name, values in request.inputs.items()}
    try:
        returned = score(batch)
    except Exception as error:
        if last - first == 1:
            text = described(error)
            if not request.skips:
                raise _RowError(first, text) from None
            failed[first] = text
            return []
        middle = (first + last) // 2
        halves = [_outputs(score, request, *half, failed) for half in ((first, middle), (middle, last))]
        return halves[0] + halves[1]
    return [_checked(returned, request.outputs, last - first)]


def described(error: BaseException) -> str:
    """Return an error with the user's line in which it was raised."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "/distributor/" not in each.filename]
    users = [each for each in frames if "/site-packages/" not in each.filename] or frames
    where = f" ({users[-1].filename}, line {users[-1].lineno}, in {users[-1].name})" if users else ""
    return f"{type(error).__name__}: {error}{where}"


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
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu")
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if not isinstance(value, (np.ndarray, list)):
        raise _ShapeError(f"the output {name!r} must be a tensor, an array or a list, not {type(value).__name__}")
    length = len(value) if isinstance(value, list) or value.ndim else 0
    if length != rows:
        shape = f"of shape {list(value.shape)}" if isinstance(value, np.ndarray) else f"of length {length}"
        raise _ShapeError(
            f"the output {name!r} of {rows} rows is {shape}: the model must return one value for each row"
        )
    return value


def _joined(values: list[Any]) -> Any:
    if (
        values
        and all(isinstance(each, np.ndarray) for each in values)
        and len({each.shape[1:] for each in values}) == 1
    ):
        return np.concatenate(values)
    return [row for each in values for row in each]
