"""Runs in a process of the model: loads it, and computes outputs of rows."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from distributor.errors import ResourceError
from distributor.machine import devices
from distributor.scoring.halving import copied, described, halved, joined
from distributor.scoring.wire import ScoreAnswer, ScoreRequest

Score = Callable[[dict[str, Any]], Any]

GPU = "cuda"  # the first that the process sees, also AMD's


def load_module(build: Callable[[], torch.nn.Module], place: str, folder: str) -> torch.nn.Module:
    """Build a module, and load the entry ``model`` of one checkpoint of a folder or URL."""
    from distributor.checkpoint.loading import load_committed

    module = build()
    load_committed({"model": module}, place, folder)
    return module


def scoring(loaded: Any, *, on_gpu: bool = False) -> Score:
    """Return what computes a batch; a module is moved to the GPU, a function has chosen its device.

    TypeError: the loader has returned nothing of this kind. ResourceError: torch sees no GPU.
    """
    if isinstance(loaded, torch.nn.Module):
        return _of_module(loaded.eval(), on_gpu)
    if not callable(loaded):
        raise TypeError(f"the loader must return a module or a function of a batch, not {type(loaded).__name__}")
    score: Score = loaded
    return score


def _of_module(module: torch.nn.Module, on_gpu: bool) -> Score:
    if on_gpu and not torch.cuda.is_available():
        raise ResourceError(
            f"num_gpus was passed, but torch {torch.__version__} sees no GPU "
            f"({devices.described(os.environ, devices.list_gpus())}): correct the driver, torch, or the discovery "
            "script of GPUs on this executor, or leave out num_gpus"
        )
    module = module.to(GPU) if on_gpu else module
    device, half = GPU if on_gpu else "cpu", _half(module)

    def score(batch: dict[str, Any]) -> Any:
        inputs = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()}
        with torch.autocast(device, half) if half else nullcontext():
            return module(*inputs.values()) if len(inputs) == 1 else module(**inputs)

    return score


def _half(module: torch.nn.Module) -> torch.dtype | None:
    """Return the type of a module's weights of half precision, to which float32 inputs are then cast."""
    kinds = {each.dtype for each in module.parameters()} & {torch.bfloat16, torch.float16}
    return kinds.pop() if len(kinds) == 1 else None


def answer(score: Score, request: ScoreRequest) -> ScoreAnswer:
    """Compute the outputs of a request's rows, batch after batch.

    If a batch fails, the request is wanted again, alone: only then its batches are halved, which are copies each time,
    since the model may change its inputs. A batch for which the GPU's memory does not suffice is halved once.
    """
    most = 0  # rows of a batch that was halved
    failed: dict[int, str] = {}
    done: list[list[Any]] = []

    def compute(first: int, last: int) -> list[Any]:
        rows = request.batch_rows if request.pads else last - first
        parts = {name: values[first:last] for name, values in request.inputs.items()}
        if request.is_alone:
            parts = {name: copied(part) for name, part in parts.items()}
        try:
            # A GPU's errors come with its values.
            returned = _on_cpu(score({name: _tensor(_padded(part, rows)) for name, part in parts.items()}))
        except torch.cuda.OutOfMemoryError as error:
            nonlocal most
            if request.pads or last - first == 1 or last - first < whole:
                raise _MemoryError(f"the GPU's memory does not suffice for a batch of {rows} rows: {error}") from None
            most = max(most, last - first)
            raise
        except Exception:
            _end_if_lost()
            raise
        outputs = [each[: last - first] for each in _checked(returned, request.outputs, rows)]
        # The function may use their memory again.
        return [copied(each) for each in outputs] if last - first < request.rows else outputs

    with torch.inference_mode():
        for first in range(0, request.rows, request.batch_rows):
            last = min(first + request.batch_rows, request.rows)
            whole = last - first
            try:
                if request.is_alone or whole == 1:
                    done += halved(compute, first, last, failed, all_rows=request.skips)
                else:
                    done.append(compute(first, last))
            except (Exception, SystemExit):
                return ScoreAnswer(again=True)
            except _ShapeError as error:
                return ScoreAnswer(error=str(error))
            except _MemoryError as error:
                return ScoreAnswer(error=f"{error}. Pass a smaller batch_rows= (it is {request.batch_rows})")
            if failed and not request.skips:
                return ScoreAnswer(failed=failed)
    outputs = tuple(joined([each[position] for each in done]) for position in range(len(request.outputs)))
    return ScoreAnswer(outputs, failed, halved_rows=most)


def _end_if_lost() -> None:
    """End this process if CUDA cannot go on in it, as after an illegal access: all later rows would fail."""
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    if not is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def together(requests: Sequence[ScoreRequest]) -> list[list[int]]:
    """Return which requests the model computes at once: those whose rows it could get in one batch."""
    groups: list[list[int]] = []
    for place, request in enumerate(requests):
        for group in groups:
            rows = sum(requests[each].rows for each in group)
            if _kind(request) == _kind(requests[group[0]]) and rows + request.rows <= request.batch_rows:
                group.append(place)
                break
        else:
            groups.append([place])
    return groups


def _kind(request: ScoreRequest) -> Any:
    """Return what is the same for requests whose rows can be computed at once; nothing equals it for others."""
    if request.is_alone or request.pads or not request.rows:
        return object()
    inputs = {
        name: (values.dtype, values.shape[1:]) if isinstance(values, np.ndarray) else None
        for name, values in request.inputs.items()
    }
    return inputs, request.outputs, request.batch_rows, request.skips


def answers(score: Score, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
    """Compute the rows of some requests together; if any fails, all are wanted again, so that no other task's do."""
    if len(requests) == 1:
        try:
            return [answer(score, requests[0])]
        except Exception as error:  # NumPy cannot join the outputs
            return [unsent(error)]
    first, ends = requests[0], list(accumulate(request.rows for request in requests))
    inputs = {name: joined([request.inputs[name] for request in requests]) for name in first.inputs}
    (whole,) = answers(score, [replace(first, inputs=inputs, rows=ends[-1])])
    if whole.error or whole.again:
        return [ScoreAnswer(again=True)] * len(requests)
    return [
        replace(whole, outputs=tuple(values[end - request.rows : end] for values in whole.outputs))
        for request, end in zip(requests, ends)
    ]


def unsent(error: Exception) -> ScoreAnswer:
    """Return the answer in place of outputs that cannot be sent."""
    return ScoreAnswer(error=f"the model's outputs cannot be sent: {described(error)}")


class _ShapeError(BaseException):
    """What the model returned is no output. No row is at fault: :func:`halved` passes it on."""


class _MemoryError(BaseException):
    """No row is at fault either."""


def _padded(values: Any, rows: int) -> Any:
    """Return values with the last one repeated up to a number of rows."""
    if (missing := rows - len(values)) <= 0:
        return values
    if isinstance(values, np.ndarray):
        return np.concatenate([values, np.repeat(values[-1:], missing, axis=0)])
    return [*values, *values[-1:] * missing]


def _tensor(values: Any) -> Any:
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def _checked(returned: Any, names: Sequence[str], rows: int) -> list[Any]:
    """Return one value for each output, which is as long as the batch."""
    if isinstance(returned, Mapping):
        if missing := [name for name in names if name not in returned]:
            raise _ShapeError(f"the model returned {list(returned)}, without the output {missing[0]!r}")
        values = [returned[name] for name in names]
    else:
        values = list(returned) if isinstance(returned, tuple) else [returned]
        if len(values) != len(names):
            raise _ShapeError(f"the model returned {len(values)} values for the outputs {', '.join(names)}")
    return [_value(name, value, rows) for name, value in zip(names, values)]


def _value(name: str, value: Any, rows: int) -> Any:
    try:
        value = _plain(value)
    except Exception as error:  # NumPy cannot take it
        raise _ShapeError(unsent(error).error) from None
    if not isinstance(value, (np.ndarray, list)):
        raise _ShapeError(f"the output {name!r} must be a tensor, an array or a list, not {type(value).__name__}")
    length = len(value) if isinstance(value, list) or value.ndim else 0
    if length != rows:
        shape = f"of shape {list(value.shape)}" if isinstance(value, np.ndarray) else f"of length {length}"
        raise _ShapeError(
            f"the output {name!r} of {rows} rows is {shape}: the model must return one value for each row"
        )
    return value


def _on_cpu(returned: Any) -> Any:
    """Return outputs with all tensors on the CPU."""
    if isinstance(returned, Mapping):
        return {name: _on_cpu(value) for name, value in returned.items()}
    if isinstance(returned, (list, tuple)):
        return (list if isinstance(returned, list) else tuple)(map(_on_cpu, returned))
    return returned.detach().to("cpu") if isinstance(returned, torch.Tensor) else returned


def _plain(value: Any) -> Any:
    """Return tensors as arrays, also those in lists: a Spark task may lack torch."""
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return [_plain(each) for each in value] if isinstance(value, list) else value
