"""Convert the state of training to named tensors and other objects, and restore the state from them.

- A module's tensors are named ``<entry>.<name>``, where ``<entry>`` is the module's key in the dict that the user
  saves, and ``<name>`` is the tensor's name in ``state_dict()`` without the prefixes of DDP, ``torch.compile`` and
  torch's activation checkpointing. So a checkpoint of a DDP model can be loaded into the bare model, or into a model
  that ``fully_shard`` has split.
- An optimizer's tensors are named ``<entry>.state.<parameter>.<key>``, where ``<parameter>`` is the name of a module's
  parameter as above, and ``<key>`` is for example ``exp_avg``. These names require that the modules in the dict have
  all parameters of the optimizer.
- Everything else is an *object* of the rank: random states, plain values, and the ``state_dict()`` of any other entry
  that has one. Each rank writes its own objects to a separate file.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import random
import re
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.tensor import DTensor

from distributor.errors import ConfigurationError
from distributor.metrics import rank as reports
from distributor.text import escapes

_RANDOM = "#random"  # names of users' entries do not begin with #

_SAMPLED = 8  # values at each end of a parameter that ranks compare
_NAMED = 3  # names in an error, at most

#: What ``torch.compile`` and torch's ``checkpoint_wrapper`` put into the names of a module's parameters.
_WRAPPED = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")

_GLOBAL = re.compile(rb"c([\w.]+\n[\w.]+)\n")  # a class or function in a pickle of protocol 2


@dataclass
class TrainingState:
    """The state of training in one rank."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # of modules and optimizers; some are DTensors
    objects: dict[str, Any] = field(default_factory=dict)  # by keys of the user's dict, such as ``epoch``


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; the whole tensor if it is not split over the ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(call: str, state: Any) -> None:
    """Raise a ConfigurationError unless what a user has passed to ``call`` as state is a dict."""
    if not isinstance(state, Mapping):
        raise ConfigurationError(
            f"{call}: state must be a dict such as {{'model': model, 'optimizer': optimizer}}, not "
            f"{type(state).__name__}"
        )


def collect(entries: Mapping[str, Any]) -> TrainingState:
    """Return the state of the entries that a user saves, such as models and optimizers. Tensors are not copied."""
    state = TrainingState()
    for entry, value in entries.items():
        if not isinstance(entry, str) or not entry or entry.startswith("#"):
            raise ConfigurationError(
                f"save_checkpoint: names of entries must be strings without a leading #, not {entry!r}"
            )
        if isinstance(value, torch.nn.Module):  # modules first: fully_shard may put back an optimizer's parameters here
            _add_module(state, entry, value)
    for entry, value in entries.items():
        if isinstance(value, torch.nn.Module):
            continue
        if isinstance(value, torch.optim.Optimizer) and (names := _names_of(value, entries)) is not None:
            _add_optimizer(state, entry, value, names)
        else:
            state.objects[entry] = value.state_dict() if _has_state(value) else value
    state.objects[_RANDOM] = _random_states()
    return state


def samples(entries: Mapping[str, Any]) -> dict[str, str]:
    """Digest some values of each module's parameters that are not split. Under DDP, all ranks have the same digests."""
    found = {}
    for entry, module in entries.items():
        if not isinstance(module, torch.nn.Module):
            continue
        digest = hashlib.sha256()
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor) and parameter.numel():
                flat = parameter.detach().reshape(-1)
                ends = torch.cat([flat[:_SAMPLED], flat[-_SAMPLED:]]).cpu()
                digest.update(bytes(ends.contiguous().view(torch.uint8).numpy()))
        found[entry] = digest.hexdigest()
    return found


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _add_module(state: TrainingState, entry: str, module: torch.nn.Module) -> None:
    _refuse_flat_parameters(entry, module)
    plain, others = _plain(module), {}
    for name, value in module.state_dict().items():
        if _is_saved_as_tensor(name, value):
            _add_tensor(state, entry, plain(name), value)
        else:
            others[plain(name)] = value
    if others:
        state.objects[entry] = others


def _add_tensor(state: TrainingState, entry: str, name: str, value: torch.Tensor) -> None:
    if (full := f"{entry}.{name}") in state.tensors:
        raise ConfigurationError(
            f"save_checkpoint: the entry {entry!r} has a tensor {name!r}, and another entry one that would have "
            f"the same name, {full!r}: rename {entry!r}"
        )
    state.tensors[full] = value.detach()


def _is_saved_as_tensor(name: str, value: object) -> bool:
    """Return whether a value in a module's state_dict is saved as a tensor. Extra state is not: its size may change."""
    return isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "_extra_state"


def _refuse_flat_parameters(entry: str, module: torch.nn.Module) -> None:
    """Refuse FullyShardedDataParallel, whose state_dict depends on settings and uses collectives."""
    if any(type(each).__name__ == "FullyShardedDataParallel" for each in module.modules()):
        raise ConfigurationError(
            f"save_checkpoint and load_checkpoint: {entry!r} uses FullyShardedDataParallel: use "
            "torch.distributed.fsdp.fully_shard, or write what torch.distributed.checkpoint.state_dict returns into "
            "checkpoint_folder(step)"
        )


def _plain(module: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that removes the prefixes of wrappers, such as DDP, from names of a module's tensors."""
    prefix, inner = "", cast("Any", module)
    while True:
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
            prefix, inner = f"{prefix}module.", inner.module
        elif isinstance(getattr(inner, "_orig_mod", None), torch.nn.Module):
            prefix, inner = f"{prefix}_orig_mod.", inner._orig_mod
        else:
            return lambda name: _WRAPPED.sub("", name.removeprefix(prefix))


def _names_of(optimizer: torch.optim.Optimizer, entries: Mapping[str, Any]) -> list[list[str]] | None:
    """Return the names of an optimizer's parameters by group; ``None`` if ``entries`` lacks a parameter's module."""
    names: dict[int, str] = {}
    for entry, module in entries.items():
        if isinstance(module, torch.nn.Module):
            plain = _plain(module)
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), f"{entry}.{plain(name)}")
    if not all(id(each) in names for group in optimizer.param_groups for each in group["params"]):
        return None
    return [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]


def _add_optimizer(state: TrainingState, entry: str, optimizer: torch.optim.Optimizer, names: list[list[str]]) -> None:
    saved = optimizer.state_dict()
    by_number = [name for group in names for name in group]
    others: dict[str, Any] = {}
    for number, values in saved["state"].items():
        for key, value in values.items():
            full = f"state.{by_number[number]}.{key}"
            if isinstance(value, torch.Tensor):
                _add_tensor(state, entry, full, value)
            else:
                others[full] = value
    groups = [{**group, "params": own} for group, own in zip(saved["param_groups"], names, strict=True)]
    state.objects[entry] = {"param_groups": groups, "state": others}


def _random_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.get_state()
        states["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if _uses_cuda():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _uses_cuda() -> bool:
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    return initialized()


def _set_random_states(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        kind, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in states:
        # At once or when CUDA starts: of all calls with seed_all, the last one counts, so an earlier seed does not.
        call: Callable[..., None] = torch.cuda._lazy_call
        call(partial(_set_cuda_states, states["cuda"]), seed_all=True)


def _set_cuda_states(states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(torch.cuda.default_generators, states):  # perhaps on another number of GPUs
        generator.set_state(state)


def pack_objects(objects: Mapping[str, Any]) -> bytes:
    """Return a rank's objects as the content of a file."""
    buffer = io.BytesIO()
    torch.save(_plain_numbers(dict(objects)), buffer, pickle_protocol=2)
    return buffer.getvalue()


def _plain_numbers(value: Any) -> Any:
    """Return a value in which Python's numbers take the place of NumPy's, which ``weights_only`` refuses to load."""
    if type(value) is dict:
        return {_plain_numbers(key): _plain_numbers(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain_numbers(each) for each in value)
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def names_in(objects: bytes) -> frozenset[bytes]:
    """Return the classes and functions that packed objects name; perhaps also words of texts that look alike."""
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(objects)) as file:  # torch may write no checksums
        (name,) = (each for each in file.namelist() if each.endswith("/data.pkl"))
        return frozenset(_GLOBAL.findall(file.read(name)))
    return frozenset({hashlib.sha256(objects).digest()})


def check_weights_only(objects: bytes) -> None:
    """Raise a ConfigurationError if torch does not load the given objects with ``weights_only``."""
    try:
        torch.load(io.BytesIO(objects), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigurationError(
            "save_checkpoint: load_checkpoint would refuse this state, because loading it may run code. Save numbers, "
            "strings, tensors, and lists and dicts of these; or pass weights_only=False to both functions. Torch says: "
            f"{_first_line(error)}"
        ) from None


def _first_line(error: pickle.UnpicklingError) -> str:
    """Return the first line of torch's message, which it writes with colours."""
    return escapes.plain(str(error).partition("\n")[0])


def load_objects(source: Path | IO[bytes], *, weights_only: bool) -> dict[str, Any]:
    """Return a rank's objects from a file; ConfigurationError if ``weights_only`` refuses a class."""
    try:
        found: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ConfigurationError(
            "load_checkpoint: the checkpoint holds objects whose loading may run code. If you trust its origin, pass "
            f"load_checkpoint(..., weights_only=False). Torch says: {_first_line(error)}"
        ) from None
    return found


def wanted(entries: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the modules' tensors, and new ones for optimizers' states, to read a checkpoint into.

    ``saved`` has the ``TensorStorageMetadata`` of each tensor in the checkpoint.
    """
    found: dict[str, torch.Tensor] = {}
    for entry, value in entries.items():
        if isinstance(value, torch.nn.Module):
            _refuse_flat_parameters(entry, value)
            plain = _plain(value)
            for name, tensor in value.state_dict().items():
                if _is_saved_as_tensor(name, tensor):
                    found[f"{entry}.{plain(name)}"] = tensor.detach()
            empty = [name for name, tensor in found.items() if tensor.device.type == "meta"]
            if empty:
                raise ConfigurationError(
                    f"load_checkpoint: {_list(empty)} of {entry!r} are on the meta device, so have no memory to load "
                    "values into: call the module's to_empty(device=...) first"
                )
    _check_tensors(found, saved)
    for entry, value in entries.items():
        if isinstance(value, torch.optim.Optimizer) and (names := _names_of(value, entries)) is not None:
            found.update(_for_optimizer(entry, value, names, saved))
    return found


def entry_of(names: Sequence[str], saved: Collection[str]) -> str:
    """Return the entry with a module's tensors of these names: ``model``, or the only one.

    >>> entry_of(["weight", "bias"], ["net.weight", "net.bias", "optimizer.state.net.weight.exp_avg"])
    'net'
    """
    if not names or any(name.startswith("model.") for name in saved):
        return "model"
    ends = [name.removesuffix(f".{names[0]}") for name in saved if name.endswith(f".{names[0]}")]
    found = [entry for entry in ends if all(f"{entry}.{name}" in saved for name in names)]
    if len(found) > 1:
        raise ConfigurationError(
            f"load_checkpoint: the checkpoint has several modules of this kind, {_list(found)}, and none is 'model'"
        )
    return found[0] if found else "model"


def _check_tensors(asked: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    missing = [name for name in asked if name not in saved]
    other = [name for name in asked if name in saved and tuple(saved[name].size) != tuple(asked[name].shape)]
    if missing:
        raise ConfigurationError(
            f"load_checkpoint: the checkpoint has no {_list(missing)}: it was saved from another model"
        )
    if other:
        name = other[0]
        raise ConfigurationError(
            f"load_checkpoint: {_list(other)} had another size when the checkpoint was saved: {name!r} had "
            f"{tuple(saved[name].size)}, and has {tuple(asked[name].shape)} now"
        )
    converted = [name for name in asked if saved[name].properties.dtype != asked[name].dtype]
    if converted:
        name = converted[0]
        before, now = saved[name].properties.dtype, asked[name].dtype
        reports.warn(f"load_checkpoint converts {_list(converted)}: {name!r} was saved as {before}, and is {now} now")


def _list(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_NAMED])) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)


def _for_optimizer(
    entry: str, optimizer: torch.optim.Optimizer, names: list[list[str]], saved: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each saved tensor of an optimizer's state, and a new tensor to read it into."""
    parameters = {
        name: parameter
        for own, group in zip(names, optimizer.param_groups, strict=True)
        for name, parameter in zip(own, group["params"], strict=True)
    }
    for full, about in saved.items():
        if not full.startswith(f"{entry}.state."):
            continue
        name = full.removeprefix(f"{entry}.state.").rpartition(".")[0]
        if name in parameters:
            parameter = parameters[name].detach()
            same = tuple(parameter.shape) == tuple(about.size)
            yield (
                full,
                (
                    torch.zeros_like(parameter, dtype=about.properties.dtype)  # a DTensor is split in the same way
                    if same
                    else torch.zeros(about.size, dtype=about.properties.dtype)
                ),
            )


def restore(entries: MutableMapping[str, Any] | Mapping[str, Any], read: TrainingState) -> None:
    """Put the state from a checkpoint into the user's entries, where saved plain values replace the present ones."""
    for entry, value in entries.items():
        if isinstance(value, torch.nn.Module):
            _restore_module(entry, value, read)
        elif isinstance(value, torch.optim.Optimizer) and (names := _names_of(value, entries)) is not None:
            _restore_optimizer(entry, value, names, read)
        elif _has_state(value):
            _restore_object(entry, value, read)
        elif entry in read.objects and isinstance(entries, MutableMapping):
            saved = read.objects[entry]
            both = isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor)
            entries[entry] = saved.to(value.device) if both else saved
    if _RANDOM in read.objects:
        _set_random_states(read.objects[_RANDOM])


def _restore_object(entry: str, value: Any, read: TrainingState) -> None:
    saved: Any = read.objects.get(entry)
    if entry not in read.objects:
        raise ConfigurationError(f"load_checkpoint: the checkpoint has no {entry!r}: leave it out of state")
    if isinstance(value, torch.optim.Optimizer):
        if any(isinstance(each, str) for group in saved["param_groups"] for each in group["params"]):
            raise ConfigurationError(
                f"load_checkpoint: the optimizer {entry!r} was saved together with its modules: pass them as well"
            )
        _check_settings(entry, value, saved["param_groups"])
    value.load_state_dict(saved)


def _restore_module(entry: str, module: torch.nn.Module, read: TrainingState) -> None:
    plain, others = _plain(module), read.objects.get(entry, {})
    module.load_state_dict(
        {
            name: read.tensors[f"{entry}.{plain(name)}"]
            if _is_saved_as_tensor(name, value)
            else others.get(plain(name), value)
            for name, value in module.state_dict().items()
        }
    )


def _restore_optimizer(
    entry: str, optimizer: torch.optim.Optimizer, names: list[list[str]], read: TrainingState
) -> None:
    saved = read.objects.get(entry)
    if saved is None:
        raise ConfigurationError(f"load_checkpoint: the checkpoint has no optimizer {entry!r}: leave it out of state")
    groups, by_name = _groups(entry, optimizer, names, saved["param_groups"])
    state: dict[int, dict[str, Any]] = {}
    start = f"{entry}.state."
    tensors = {full.removeprefix(start): value for full, value in read.tensors.items() if full.startswith(start)}
    others = {full.removeprefix("state."): value for full, value in saved["state"].items()}
    for full, value in {**tensors, **others}.items():
        name, _, key = full.rpartition(".")
        if name in by_name:
            state.setdefault(by_name[name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _check_settings(entry: str, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Refuse the parameter groups of an optimizer of another class."""
    for group, now in zip(saved, optimizer.param_groups, strict=False):
        lacking, others = sorted(now.keys() - group.keys()), sorted(group.keys() - now.keys() - {"initial_lr"})
        if lacking and others:  # another version of torch may only have more, or only fewer
            raise ConfigurationError(
                f"load_checkpoint: the optimizer {entry!r} was saved with {', '.join(others)}, in place of which "
                f"{type(optimizer).__name__} has {', '.join(lacking)}: pass an optimizer of the class that was saved, "
                "or leave it out of state"
            )


def _groups(
    entry: str, optimizer: torch.optim.Optimizer, names: list[list[str]], saved: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return saved parameter groups with the indexes that ``load_state_dict`` needs, and the indexes by name."""
    if [sorted(map(str, group["params"])) for group in saved] != [sorted(group) for group in names]:
        raise ConfigurationError(
            f"load_checkpoint: the optimizer {entry!r} had other parameters when the checkpoint was saved: give it the "
            "same groups of parameters"
        )
    _check_settings(entry, optimizer, saved)
    numbers = optimizer.state_dict()["param_groups"]
    by_name = {
        name: number
        for own, group in zip(names, numbers, strict=True)
        for name, number in zip(own, group["params"], strict=True)
    }
    return [{**group, "params": own["params"]} for group, own in zip(saved, numbers, strict=True)], by_name
