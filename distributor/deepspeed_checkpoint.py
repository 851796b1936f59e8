"""Checkpoints of a DeepSpeed engine that outlive the number of ranks. Every rank has to call each of these functions.

    from distributor import deepspeed_checkpoint

    deepspeed_checkpoint.save(engine, "/mnt/shared/checkpoints", tag="epoch-3")
    deepspeed_checkpoint.load(engine, "/mnt/shared/checkpoints")  # with any number of ranks
    weights = deepspeed_checkpoint.fp32_state_dict(engine)  # on rank 0, for torch.save

Source: https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distributor.errors import ConfigurationError

#: What follows the tag in the name of a checkpoint that any number of ranks can load.
UNIVERSAL = "_universal"

_CLIENT_STATE = "distributor_client_state"


def save(
    engine: Any,
    folder: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    workers: int = 1,
) -> str:
    """Saves model, optimizer and scheduler: a shard from each rank, then the universal form of them all.

    Rank 0 makes the universal form from the shards, which takes as much of the disk again; ``folder/tag`` holds the
    shards and may be removed, ``folder/tag_universal`` the rest.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        folder: on a disk that the ranks of all nodes share.
        tag: name of the checkpoint; by default that of the global step.
        client_state: whatever else of yours is to be saved: epoch, position in the data.
        workers: processes with which rank 0 makes the universal form; more than one forks, which CUDA does not like.

    Returns:
        The tag.

    Raises:
        ConfigurationError: rank 0 does not see every rank's shard: the folder is not shared.
        RuntimeError: DeepSpeed could not make the universal form; every rank raises it.
    """
    tag = tag or f"global_step{engine.global_steps}"
    engine.save_checkpoint(str(folder), tag=tag, client_state={_CLIENT_STATE: dict(client_state or {})})
    if engine.zero_optimization():  # without ZeRO every rank's state is that of all
        _together(lambda: _make_universal(Path(folder), tag, workers))
    return tag


def load(engine: Any, folder: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """Loads what :func:`save` saved, into an engine that has just been initialized, with any number of ranks.

    Args:
        engine: what ``deepspeed.initialize`` returned, with the ZeRO stage that it was saved with.
        folder, tag: as they were saved; by default the latest.

    Returns:
        The ``client_state``.

    Raises:
        ConfigurationError: there is no such checkpoint.

    Example:
        >>> state = load(engine, folder)  # doctest: +SKIP
        >>> for epoch in range(state["epoch"] + 1, epochs): ...  # doctest: +SKIP
    """
    root = Path(folder)
    found = _latest(root, bool(engine.zero_optimization())) if tag is None else tag
    if engine.zero_optimization() and not found.endswith(UNIVERSAL):
        found += UNIVERSAL
    if not (root / found).is_dir():
        there = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        raise ConfigurationError(
            f"there is no checkpoint {str(root / found)!r}; what is there: {', '.join(there) or 'nothing'}"
        )
    with _universal(engine, found.endswith(UNIVERSAL)):
        path, state = engine.load_checkpoint(str(root), tag=found)
    if path is None:
        raise ConfigurationError(f"DeepSpeed cannot load the checkpoint {str(root / found)!r}")
    mine: dict[str, Any] = state.get(_CLIENT_STATE, {})
    return mine


def fp32_state_dict(engine: Any) -> dict[str, Any]:
    """The whole model in full precision, gathered from all ranks one parameter at a time; needs no disk.

    Returns:
        On rank 0 a state dict of CPU tensors, which ``model.load_state_dict`` of the plain model takes; ``{}`` on the
        others.

    Raises:
        ConfigurationError: the model is pipelined or has experts on other ranks, so that no rank knows all its parts.

    Example:
        >>> weights = fp32_state_dict(engine)  # doctest: +SKIP
        >>> if dist.get_rank() == 0: torch.save(weights, "model.pt")  # doctest: +SKIP
    """
    import torch
    import torch.distributed as dist

    if hasattr(engine, "is_first_stage") or engine.has_moe_layers:
        raise ConfigurationError(
            "fp32_state_dict is for models that every rank knows all of; of a pipeline or a mixture of experts, save "
            "the parts: engine.save_checkpoint writes layers and experts into files of their own"
        )
    masters = _masters(engine.optimizer)
    module, first = engine.module, dist.get_rank() == 0
    parameters = dict(module.named_parameters(remove_duplicate=False))
    whole: dict[int, Any] = {}
    result: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        parameter = parameters.get(name)
        if parameter is None:  # a buffer, or a module's extra state
            kept = _on_cpu(value) if isinstance(value, torch.Tensor) else value
        elif id(parameter) in whole:  # tied to another one
            kept = whole[id(parameter)]
        else:
            full = _full(parameter, masters)
            kept = whole[id(parameter)] = _on_cpu(full) if first else None
        if first:
            result[name] = kept
    return result


def _on_cpu(tensor: Any) -> Any:
    """A copy; in fp32, if it has a fraction at all."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).to("cpu", copy=True)


def _full(parameter: Any, masters: Mapping[int, Any]) -> Any:
    """A whole parameter in the best precision that there is; a collective of all ranks."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if not parameter.requires_grad and hasattr(parameter, "ds_id"):  # frozen: stage 3 splits it, without a master copy
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    return full if full is not None else masters.get(id(parameter), parameter)


def _masters(optimizer: Any) -> dict[int, Any]:
    """Master copies by the parameter they are of, where DeepSpeed's optimizer without ZeRO keeps them."""
    from torch._utils import _unflatten_dense_tensors

    found: dict[int, Any] = {}
    for number, group in enumerate(getattr(optimizer, "fp16_groups", [])):
        if getattr(optimizer, "fp32_groups", None):
            copies = optimizer.fp32_groups[number]
        elif getattr(optimizer, "fp32_groups_flat", None):
            copies = _unflatten_dense_tensors(optimizer.fp32_groups_flat[number], group)  # type: ignore[no-untyped-call]
        else:
            continue
        found |= {id(parameter): copy for parameter, copy in zip(group, copies)}
    return found


def _latest(root: Path, universal: bool) -> str:
    path = root / ("latest_universal" if universal else "latest")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"there is no checkpoint in {str(root)!r}: no file {path.name!r}") from error


@contextlib.contextmanager
def _universal(engine: Any, on: bool) -> Iterator[None]:
    """Has an engine take a checkpoint for the universal form, as ``{"checkpoint": {"load_universal": true}}`` does."""
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = on
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before


def _together(action: Callable[[], None]) -> None:
    """Does something on rank 0 once all have come; if it fails, it fails on every rank."""
    import torch.distributed as dist

    dist.barrier()
    said: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            known = isinstance(error, ConfigurationError)
            said = [error if known else RuntimeError(f"no universal checkpoint: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(said)
    if said[0] is not None:
        raise said[0]


def _make_universal(folder: Path, tag: str, workers: int) -> None:
    import torch.distributed as dist
    from deepspeed.checkpoint.ds_to_universal import main

    shards = len(list((folder / tag).glob("*_optim_states.pt")))
    if shards < dist.get_world_size():
        raise ConfigurationError(
            f"rank 0 sees the shards of {shards} of {dist.get_world_size()} ranks in {str(folder / tag)!r}: a "
            "checkpoint needs a folder that all nodes share (NFS, a distributed file system, a mounted bucket)"
        )
    target = folder / f"{tag}{UNIVERSAL}"
    shutil.rmtree(target, ignore_errors=True)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        main(
            argparse.Namespace(
                input_folder=str(folder / tag),
                output_folder=str(target),
                num_extract_workers=workers,
                num_merge_workers=workers,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
