"""Checkpoints of DeepSpeed engines: any number of ranks can load a checkpoint, whatever number of ranks saved it.

If one rank calls ``save``, ``load`` or ``fp32_state_dict``, all ranks must call the same function.

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
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributor.errors import ConfigurationError

UNIVERSAL = "_universal"  # follows the tag in the name of a universal checkpoint

#: What DeepSpeed leaves out: parameters and buffers that are not in the optimizer, and the settings of its groups.
_REST = "distributor_rest.pt"

_CLIENT_STATE = "distributor_client_state"

_LATEST = "latest_universal"

_UNFINISHED = ".unfinished"  # where rank 0 makes a universal checkpoint, before it replaces an earlier one

_PATIENCE = timedelta(days=7)  # longer than any disk takes; if rank 0 fails, the launcher ends the others

_numbers = itertools.count()


def save(
    engine: Any,
    folder: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    workers: int = 1,
) -> str:
    """Save model, optimizer and scheduler in a form that any number of ranks can load.

    With ZeRO, each rank first writes its part (a *shard*) to ``folder/tag``. From the shards, rank 0 then makes a
    *universal checkpoint* in ``folder/tag_universal``. This checkpoint takes as much disk space as the shards. Any
    number of ranks can load it, so ``folder/tag`` may be removed afterwards. If the same tag was saved before, the
    earlier universal checkpoint can be loaded until the new one is complete.

    Without ZeRO, no universal checkpoint is made, because none is needed: any number of ranks can load ``folder/tag``
    itself. If the same tag was saved with ZeRO before, its universal checkpoint is removed once the new checkpoint is
    complete.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned. With ZeRO, its optimizer must be a variant of Adam
            whose states are not offloaded to NVMe.
        folder: a folder on a disk that the ranks of all nodes share.
        tag: name of the checkpoint; by default ``global_step`` followed by the number of the step.
        client_state: your own data to save as well, such as the epoch or the position in the data.
        workers: number of processes that make the universal checkpoint. With more than one, rank 0 forks them, which
            CUDA does not support well.

    Returns:
        The tag under which the checkpoint was saved.

    Raises:
        ConfigurationError: the tag cannot be used, rank 0 does not see every rank's shard (the folder is not shared),
            DeepSpeed makes no universal checkpoints of this model or optimizer, or ZeRO stage 3 is used and its
            optimizer has not made a step yet. Every rank raises this error.
        RuntimeError: rank 0 could not make the universal checkpoint, or could not remove an earlier one. Every rank
            raises this error.
    """
    root, tag = Path(folder), f"global_step{engine.global_steps}" if tag is None else tag
    if not tag or "/" in tag or tag.startswith(".") or tag.endswith(UNIVERSAL):
        raise ConfigurationError(f"tag {tag!r} must be the name of a folder and must not end in {UNIVERSAL!r}")
    state = {_CLIENT_STATE: dict(client_state or {})}
    if not engine.zero_optimization():  # every rank has the whole state
        engine.save_checkpoint(str(root), tag=tag, client_state=state)
        _together(lambda: _remove_universal(root, tag))
        return tag
    _check_whole(engine)
    if engine.zero_nvme_offload_optimizer():
        raise ConfigurationError(
            "DeepSpeed cannot make universal checkpoints of optimizer states that are offloaded to NVMe: use "
            "engine.save_checkpoint, whose shards can be loaded with the same number of ranks only"
        )
    if engine.zero_optimization_stage() == 3 and engine.global_steps == 0:
        raise ConfigurationError(
            "ZeRO-3's optimizer has no state before its first step, and DeepSpeed cannot make a universal checkpoint "
            "without it: save after engine.step()"
        )
    rest = {
        "state": _gather(engine, lambda parameter: not _in_optimizer(parameter), lambda tensor: tensor.detach().cpu()),
        "stage": engine.zero_optimization_stage(),
        "groups": [
            {name: value for name, value in group.items() if name != "params"}
            for group in engine.optimizer.param_groups
        ],
    }
    # Without this removal, shards of an earlier save with more ranks would count as part of this save.
    _together(lambda: shutil.rmtree(root / tag, ignore_errors=True))
    engine.save_checkpoint(str(root), tag=tag, client_state=state)
    _together(lambda: _make_universal(root, tag, rest, workers))
    return tag


def load(engine: Any, folder: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """Load a checkpoint that :func:`save` made. Any number of ranks can load it, into newly initialized engines.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned. It must have the same ZeRO stage as the checkpoint.
        folder, tag: the same as in :func:`save`. By default, the latest checkpoint in the folder is loaded.

    Returns:
        The ``client_state`` that :func:`save` got; ``{}`` if it got none.

    Raises:
        ConfigurationError: the checkpoint does not exist, it has another ZeRO stage than the engine, or DeepSpeed
            cannot load it.
        OSError: a file cannot be read.

    Example:
        >>> state = load(engine, folder)  # doctest: +SKIP
        >>> for epoch in range(state["epoch"] + 1, epochs): ...  # doctest: +SKIP
    """
    root, universal = Path(folder), bool(engine.zero_optimization())
    name = _latest(root, universal) if tag is None else tag
    if universal and not name.endswith(UNIVERSAL):
        name += UNIVERSAL
    if not (root / name).is_dir():
        there = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        raise ConfigurationError(
            f"there is no checkpoint {str(root / name)!r}; the folder has {', '.join(there) or 'no checkpoints'}"
        )
    rest = _read_rest(engine, root / name if universal else root / f"{name}{UNIVERSAL}")
    with _universal(engine, universal):
        path, state = engine.load_checkpoint(str(root), tag=name)
    if path is None:
        raise ConfigurationError(f"DeepSpeed cannot load the checkpoint {str(root / name)!r}")
    if universal and rest is not None:
        _load_rest(engine, rest)
    mine: dict[str, Any] = state.get(_CLIENT_STATE, {})
    return mine


def fp32_state_dict(engine: Any) -> dict[str, Any]:
    """Return the whole model in full precision, on rank 0.

    The model is gathered from all ranks, one parameter at a time, without using a disk.

    Returns:
        On rank 0, a state dict of CPU tensors for the plain torch model's ``load_state_dict``; on other ranks, ``{}``.

    Raises:
        ConfigurationError: the model is a pipeline, is split by tensor parallelism or has experts on other ranks, so
            that no rank's module has all parameters of the model.

    Example:
        >>> weights = fp32_state_dict(engine)  # doctest: +SKIP
        >>> if dist.get_rank() == 0: torch.save(weights, "model.pt")  # doctest: +SKIP
    """
    _check_whole(engine)
    return _gather(engine, lambda parameter: True, _on_cpu)


def _check_whole(engine: Any) -> None:
    if hasattr(engine, "is_first_stage") or engine.has_moe_layers or engine.autotp_size() > 1:
        raise ConfigurationError(
            "every rank's module must have all parameters of the model. For a pipeline, a mixture of experts or tensor "
            "parallelism, use engine.save_checkpoint, which writes each part to its own file"
        )


def _gather(engine: Any, wanted: Callable[[Any], bool], keep: Callable[[Any], Any]) -> dict[str, Any]:
    """Return, on rank 0, the state dict of ``wanted`` parameters, as ``keep`` copies them. All ranks must call it."""
    import torch
    import torch.distributed as dist

    masters = _masters(engine.optimizer)
    module, first = engine.module, dist.get_rank() == 0
    parameters = dict(module.named_parameters(remove_duplicate=False))
    whole: dict[int, Any] = {}
    result: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        parameter = parameters.get(name)
        if parameter is None:  # a buffer, or a module's extra state
            kept = keep(value) if isinstance(value, torch.Tensor) else value
        elif not wanted(parameter):
            continue
        elif id(parameter) in whole:  # tied to another parameter
            kept = whole[id(parameter)]
        else:
            full = _full(parameter, masters)
            kept = whole[id(parameter)] = keep(full) if first else None
        if first:
            result[name] = kept
    return result


def _on_cpu(tensor: Any) -> Any:
    """Return a copy of a tensor on the CPU, in fp32 if it has floating-point numbers."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).to("cpu", copy=True)


def _in_optimizer(parameter: Any) -> bool:
    """Return whether ZeRO keeps a master copy of a parameter, split over ranks; it keeps none of frozen ones."""
    stage3 = getattr(parameter, "_z3_optimizer", None)  # with ZeRO stage 3, every parameter has this attribute
    if stage3 is not None:
        return stage3.get_param_id(parameter) in stage3.grad_position
    return hasattr(parameter, "_hp_mapping")


def _full(parameter: Any, masters: Mapping[int, Any]) -> Any:
    """Return a parameter in full, in the best precision available. All ranks must call it."""
    if _in_optimizer(parameter):
        from deepspeed.utils import safe_get_full_fp32_param

        full = safe_get_full_fp32_param(parameter)
        if full is not None:
            return full
    with _whole([parameter]):
        return masters.get(id(parameter), parameter).detach().clone()


def _whole(parameters: list[Any], modifier_rank: int | None = None) -> Any:
    """Let ranks have whole the parameters that ZeRO-3 splits, and get ``modifier_rank``'s changes, within ``with``."""
    import deepspeed

    split = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    return deepspeed.zero.GatheredParameters(split, modifier_rank=modifier_rank, enabled=bool(split))


def _masters(optimizer: Any) -> dict[int, Any]:
    """Map ``id(parameter)`` to the fp32 copy that DeepSpeed's optimizer keeps if ZeRO is off."""
    from torch._utils import _unflatten_dense_tensors

    masters: dict[int, Any] = {}
    if hasattr(optimizer, "fp32_groups_flat") or hasattr(optimizer, "fp32_groups"):
        for number, group in enumerate(getattr(optimizer, "fp16_groups", [])):
            if getattr(optimizer, "fp32_groups", None):
                copies = optimizer.fp32_groups[number]
            else:
                copies = _unflatten_dense_tensors(optimizer.fp32_groups_flat[number], group)  # type: ignore[no-untyped-call]
            masters |= {id(parameter): copy for parameter, copy in zip(group, copies)}
    return masters


def _read_rest(engine: Any, folder: Path) -> dict[str, Any] | None:
    """Return what :func:`save` added to a universal checkpoint; ``None`` if DeepSpeed's own tools made it."""
    import torch

    if not (folder / _REST).exists():
        return None
    rest: dict[str, Any] = torch.load(folder / _REST, map_location="cpu", weights_only=False)
    if rest["stage"] != engine.zero_optimization_stage():
        raise ConfigurationError(
            f"the checkpoint {str(folder)!r} was saved with ZeRO stage {rest['stage']}, but this engine has stage "
            f"{engine.zero_optimization_stage()}: use the same stage, or move the weights with fp32_state_dict"
        )
    return rest


def _load_rest(engine: Any, rest: Mapping[str, Any]) -> None:
    """Restore what DeepSpeed does not load from a universal checkpoint."""
    import torch
    import torch.distributed as dist

    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in engine.module.state_dict(keep_vars=True).items():
            saved = rest["state"].get(name)
            if not isinstance(saved, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            if name not in parameters:
                value.copy_(saved)
            elif not _in_optimizer(value):
                with _whole([value], modifier_rank=0):
                    if dist.get_rank() == 0 or not hasattr(value, "ds_id"):
                        value.copy_(saved)
    groups = engine.optimizer.param_groups
    if len(groups) == len(rest["groups"]):  # DeepSpeed may give every group the settings of the first
        for group, settings in zip(groups, rest["groups"]):
            group.update(settings)


def _latest(root: Path, universal: bool) -> str:
    path = root / (_LATEST if universal else "latest")
    try:
        tag = path.read_text().strip()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no checkpoint in {str(root)!r}: the file {path.name!r} is missing"
        ) from error
    if not tag:
        raise ConfigurationError(f"the file {str(path)!r} is empty: pass the tag of the checkpoint to load")
    return tag


@contextlib.contextmanager
def _universal(engine: Any, on: bool) -> Iterator[None]:
    """Let an engine load universal checkpoints if ``on``, as ``{"checkpoint": {"load_universal": true}}`` would."""
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = on
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before


def _together(action: Callable[[], None]) -> None:
    """Run an action on rank 0 once all ranks have called this. If it fails, all ranks raise an error."""
    import torch.distributed as dist

    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    key = f"distributor/together/{next(_numbers)}"
    if dist.get_rank() == 0:
        failure = ""
        try:
            action()
        except ConfigurationError as error:
            failure = f"!{error}"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        store.set(key, failure)
    store.wait([key], _PATIENCE)  # a large model may take longer than the timeout of collectives
    failure = store.get(key).decode()
    if failure.startswith("!"):
        raise ConfigurationError(failure[1:])
    if failure:
        raise RuntimeError(f"could not complete the checkpoint: {failure}")


def _remove_universal(root: Path, tag: str) -> None:
    """Remove the universal checkpoint that an earlier save with ZeRO made with this tag, if there is one."""
    earlier, unfinished = root / f"{tag}{UNIVERSAL}", root / _UNFINISHED
    if earlier.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        earlier.rename(unfinished / "before")  # removing it takes time, and no part of it may be loaded meanwhile
        shutil.rmtree(unfinished, ignore_errors=True)


def _make_universal(root: Path, tag: str, rest: Mapping[str, Any], workers: int) -> None:
    """Make a universal checkpoint from the shards of all ranks. Once complete, it replaces an earlier one."""
    import torch
    import torch.distributed as dist
    from deepspeed.checkpoint.ds_to_universal import main

    shards = len(list((root / tag).glob("*_optim_states.pt")))
    if shards < dist.get_world_size():
        raise ConfigurationError(
            f"rank 0 sees the shards of {shards} of {dist.get_world_size()} ranks in {str(root / tag)!r}: a "
            "checkpoint needs a folder that all nodes share (NFS, a distributed file system, a mounted bucket)"
        )
    name, unfinished = f"{tag}{UNIVERSAL}", root / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    output = io.StringIO()
    asked = {
        "input_folder": str(root / tag),
        "output_folder": str(unfinished / name),
        "num_extract_workers": workers,
        "num_merge_workers": workers,
        "keep_temp_folder": False,
        "strict": True,
        "inject_missing_state": True,
    }
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main(argparse.Namespace(**asked))
    except KeyError as error:
        if not str(error.args[0]).startswith("exp_avg"):
            raise
        raise ConfigurationError(
            "DeepSpeed makes universal checkpoints only for optimizers like Adam; engine.load_checkpoint can load the "
            f"shards in {str(root / tag)!r} with the same number of ranks"
        ) from error
    torch.save(rest, unfinished / name / _REST)
    if (root / name).exists():
        (root / name).rename(unfinished / "before")
    (unfinished / name).rename(root / name)
    (unfinished / "latest").write_text(name)
    (unfinished / "latest").replace(root / _LATEST)
    shutil.rmtree(unfinished, ignore_errors=True)
