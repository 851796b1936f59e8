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
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributor.errors import ConfigurationError

#: What follows the tag in the name of a checkpoint that any number of ranks can load.
UNIVERSAL = "_universal"

#: What DeepSpeed's universal form lacks: all that is not in the optimizer, and the settings of its groups.
_REST = "distributor_rest.pt"

_CLIENT_STATE = "distributor_client_state"

_LATEST = "latest_universal"

#: Where rank 0 makes a universal form before it takes the place of another.
_UNFINISHED = ".unfinished"

#: Longer than any disk takes; the ranks that wait end with rank 0.
_PATIENCE = timedelta(days=7)

_numbers = itertools.count()


def save(
    engine: Any,
    folder: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    workers: int = 1,
) -> str:
    """Saves model, optimizer and scheduler: a shard from each rank, then the universal form of them all.

    Rank 0 makes the universal form from the shards, which takes as much of the disk again; ``folder/tag`` holds the
    shards and may be removed, ``folder/tag_universal`` the rest. What an earlier call saved under the tag can be loaded
    until the new one is complete.

    Args:
        engine: what ``deepspeed.initialize`` returned. With ZeRO, its optimizer has to be of Adam's kind, in memory.
        folder: on a disk that the ranks of all nodes share.
        tag: name of the checkpoint; by default that of the global step.
        client_state: whatever else of yours is to be saved: epoch, position in the data.
        workers: processes with which rank 0 makes the universal form; more than one forks, which CUDA does not like.

    Returns:
        The tag.

    Raises:
        ConfigurationError: the tag cannot be used, rank 0 does not see every rank's shard (the folder is not shared),
            or there are no universal checkpoints of such a model or optimizer, or not yet. Every rank raises it.
        RuntimeError: DeepSpeed could not make the universal form; every rank raises it.
    """
    root, tag = Path(folder), f"global_step{engine.global_steps}" if tag is None else tag
    if not tag or "/" in tag or tag.startswith(".") or tag.endswith(UNIVERSAL):
        raise ConfigurationError(f"tag {tag!r} has to be the name of a folder, and not to end in {UNIVERSAL!r}")
    state = {_CLIENT_STATE: dict(client_state or {})}
    if not engine.zero_optimization():  # every rank's state is that of all
        engine.save_checkpoint(str(root), tag=tag, client_state=state)
        return tag
    _check_whole(engine)
    if engine.zero_nvme_offload_optimizer():
        raise ConfigurationError(
            "DeepSpeed makes no universal checkpoints of optimizer states that are offloaded to NVMe: "
            "engine.save_checkpoint saves shards for the same number of ranks"
        )
    if engine.zero_optimization_stage() == 3 and engine.global_steps == 0:
        raise ConfigurationError(
            "ZeRO-3's optimizer has no state before its first step, and DeepSpeed makes no universal checkpoint of "
            "that: save after engine.step()"
        )
    rest = {
        "state": _gather(engine, lambda parameter: not _in_optimizer(parameter), lambda tensor: tensor.detach().cpu()),
        "stage": engine.zero_optimization_stage(),
        "groups": [_settings(group) for group in engine.optimizer.param_groups],
    }
    _together(lambda: shutil.rmtree(root / tag, ignore_errors=True))  # shards of more ranks would be taken for these
    engine.save_checkpoint(str(root), tag=tag, client_state=state)
    _together(lambda: _make_universal(root, tag, rest, workers))
    return tag


def load(engine: Any, folder: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """Loads what :func:`save` saved, into an engine that has just been initialized, with any number of ranks.

    Args:
        engine: what ``deepspeed.initialize`` returned, with the ZeRO stage that it was saved with.
        folder, tag: as they were saved; by default the latest.

    Returns:
        The ``client_state``.

    Raises:
        ConfigurationError: there is no such checkpoint, or it is one of another ZeRO stage.

    Example:
        >>> state = load(engine, folder)  # doctest: +SKIP
        >>> for epoch in range(state["epoch"] + 1, epochs): ...  # doctest: +SKIP
    """
    root, universal = Path(folder), bool(engine.zero_optimization())
    found = _latest(root, universal) if tag is None else tag
    if universal and not found.endswith(UNIVERSAL):
        found += UNIVERSAL
    if not (root / found).is_dir():
        there = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        raise ConfigurationError(
            f"there is no checkpoint {str(root / found)!r}; what is there: {', '.join(there) or 'nothing'}"
        )
    rest = _read_rest(engine, root / found if universal else root / f"{found}{UNIVERSAL}")
    with _universal(engine, universal):
        path, state = engine.load_checkpoint(str(root), tag=found)
    if path is None:
        raise ConfigurationError(f"DeepSpeed cannot load the checkpoint {str(root / found)!r}")
    if universal and rest is not None:
        _load_rest(engine, rest)
    mine: dict[str, Any] = state.get(_CLIENT_STATE, {})
    return mine


def fp32_state_dict(engine: Any) -> dict[str, Any]:
    """The whole model in full precision, gathered from all ranks one parameter at a time; needs no disk.

    Returns:
        On rank 0 a state dict of CPU tensors, which ``model.load_state_dict`` of the plain model takes; ``{}`` on the
        others.

    Raises:
        ConfigurationError: the model is pipelined, split by tensor parallelism or has experts on other ranks, so that
            no rank knows all its parts.

    Example:
        >>> weights = fp32_state_dict(engine)  # doctest: +SKIP
        >>> if dist.get_rank() == 0: torch.save(weights, "model.pt")  # doctest: +SKIP
    """
    _check_whole(engine)
    return _gather(engine, lambda parameter: True, _on_cpu)


def _check_whole(engine: Any) -> None:
    if hasattr(engine, "is_first_stage") or engine.has_moe_layers or engine.autotp_size() > 1:
        raise ConfigurationError(
            "this is for models that every rank knows all of; of a pipeline, a mixture of experts or a model that is "
            "split by tensors, save the parts: engine.save_checkpoint writes them into files of their own"
        )


def _gather(engine: Any, wanted: Callable[[Any], bool], keep: Callable[[Any], Any]) -> dict[str, Any]:
    """On rank 0 the wanted parameters, whole, and all else of the state dict; a collective of all ranks."""
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
        elif id(parameter) in whole:  # tied to another one
            kept = whole[id(parameter)]
        else:
            full = _full(parameter, masters)
            kept = whole[id(parameter)] = keep(full) if first else None
        if first:
            result[name] = kept
    return result


def _on_cpu(tensor: Any) -> Any:
    """A copy; in fp32, if it has a fraction at all."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).to("cpu", copy=True)


def _in_optimizer(parameter: Any) -> bool:
    """Whether ZeRO keeps a master copy of a parameter, split over ranks; not of frozen ones, say."""
    stage3 = getattr(parameter, "_z3_optimizer", None)  # every parameter of the module has it
    if stage3 is not None:
        return stage3.get_param_id(parameter) in stage3.grad_position
    return hasattr(parameter, "_hp_mapping")


def _full(parameter: Any, masters: Mapping[int, Any]) -> Any:
    """A whole parameter in the best precision that there is; a collective of all ranks."""
    if _in_optimizer(parameter):
        from deepspeed.utils import safe_get_full_fp32_param

        full = safe_get_full_fp32_param(parameter)
        if full is not None:
            return full
    with _whole([parameter]):
        return masters.get(id(parameter), parameter).detach().clone()


def _whole(parameters: list[Any], modifier_rank: int | None = None) -> Any:
    """Parameters that stage 3 splits are whole inside; with a ``modifier_rank``, what that writes into them counts."""
    import deepspeed

    split = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    return deepspeed.zero.GatheredParameters(split, modifier_rank=modifier_rank, enabled=bool(split))


def _masters(optimizer: Any) -> dict[int, Any]:
    """Master copies by the parameter they are of, where DeepSpeed's optimizer without ZeRO keeps them."""
    from torch._utils import _unflatten_dense_tensors

    found: dict[int, Any] = {}
    if hasattr(optimizer, "fp32_groups_flat") or hasattr(optimizer, "fp32_groups"):
        for number, group in enumerate(getattr(optimizer, "fp16_groups", [])):
            if getattr(optimizer, "fp32_groups", None):
                copies = optimizer.fp32_groups[number]
            else:
                copies = _unflatten_dense_tensors(optimizer.fp32_groups_flat[number], group)  # type: ignore[no-untyped-call]
            found |= {id(parameter): copy for parameter, copy in zip(group, copies)}
    return found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer's group says beside its parameters: learning rate, weight decay."""
    return {name: value for name, value in group.items() if name != "params"}


def _read_rest(engine: Any, folder: Path) -> dict[str, Any] | None:
    """What :func:`save` put beside DeepSpeed's universal form; ``None`` if its own tools made that."""
    import torch

    if not (folder / _REST).exists():
        return None
    rest: dict[str, Any] = torch.load(folder / _REST, map_location="cpu", weights_only=False)
    if rest["stage"] != engine.zero_optimization_stage():
        raise ConfigurationError(
            f"the checkpoint {str(folder)!r} was saved with ZeRO stage {rest['stage']}, this engine has stage "
            f"{engine.zero_optimization_stage()}: load it with the same stage, or take its fp32_state_dict"
        )
    return rest


def _load_rest(engine: Any, rest: Mapping[str, Any]) -> None:
    """Restores what DeepSpeed leaves as it is, or as it is in the first group, when it loads a universal checkpoint."""
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
    if len(groups) == len(rest["groups"]):
        for group, settings in zip(groups, rest["groups"]):
            group.update(settings)


def _latest(root: Path, universal: bool) -> str:
    path = root / (_LATEST if universal else "latest")
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
    """Does something on rank 0 once all have come; if it fails, it fails on every rank.

    The others wait at the store: collectives have a timeout, which large models' disks may take longer than.
    """
    import torch.distributed as dist

    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    key = f"distributor/together/{next(_numbers)}"
    if dist.get_rank() == 0:
        said = ""
        try:
            action()
        except ConfigurationError as error:
            said = f"!{error}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        store.set(key, said)
    store.wait([key], _PATIENCE)
    said = store.get(key).decode()
    if said.startswith("!"):
        raise ConfigurationError(said[1:])
    if said:
        raise RuntimeError(f"no universal checkpoint: {said}")


def _make_universal(root: Path, tag: str, rest: Mapping[str, Any], workers: int) -> None:
    """The universal form of a tag's shards, complete before it takes the place of an earlier one."""
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
    said = io.StringIO()
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
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main(argparse.Namespace(**asked))
    except KeyError as error:
        if not str(error.args[0]).startswith("exp_avg"):
            raise
        raise ConfigurationError(
            "DeepSpeed makes universal checkpoints of optimizers of Adam's kind only; the shards in "
            f"{str(root / tag)!r} can be loaded by engine.load_checkpoint with the same number of ranks"
        ) from error
    torch.save(rest, unfinished / name / _REST)
    if (root / name).exists():
        (root / name).rename(unfinished / "before")
    (unfinished / name).rename(root / name)
    (unfinished / "latest").write_text(name)
    (unfinished / "latest").replace(root / _LATEST)
    shutil.rmtree(unfinished, ignore_errors=True)
