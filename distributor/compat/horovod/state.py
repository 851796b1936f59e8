"""Copy parameters and the state of an optimizer from one rank to all ranks, so that all start from the same point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from distributor.compat.horovod import collectives, world
from distributor.errors import ConfigurationError


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0, process_set: Any = None
) -> None:
    """Copy the parameters of one rank to all ranks, in place.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``. Values that are not tensors stay unchanged.
        root_rank: the rank whose values are copied.
        process_set: must be ``None``, since sets of only some ranks are not supported.

    Raises:
        ConfigurationError: ``params`` is neither a mapping nor pairs of a name and a value, or ``init`` was not called.
    """
    world.require("broadcast_parameters")
    if isinstance(params, Mapping):
        pairs = list(params.items())
    else:
        pairs = list(params) if isinstance(params, Iterable) else [params]
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ConfigurationError(
                "params must be model.state_dict() or model.named_parameters(), with a name for each tensor, not "
                f"a {type(params).__name__}"
            )
    for _, value in pairs:
        if isinstance(value, torch.Tensor):
            collectives.broadcast_(value, root_rank, process_set=process_set)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, process_set: Any = None) -> None:
    """Copy the state of one rank's optimizer to all ranks: the options of its groups, and tensors such as momenta.

    Args:
        optimizer: an optimizer over the same parameters on each rank. Its state may be empty, or differ between ranks.
        root_rank: the rank whose state is copied.
        process_set: must be ``None``, since sets of only some ranks are not supported.

    Raises:
        ConfigurationError: ``init`` was not called.
    """
    world.require("broadcast_optimizer_state")
    own: dict[str, Any] = optimizer.state_dict()
    theirs = collectives.broadcast_object(outline(own), root_rank, process_set=process_set)
    is_root = world.rank() == root_rank
    device = next((parameter.device for group in optimizer.param_groups for parameter in group["params"]), None)
    for number, state in theirs["state"].items():
        for name, shape in state.items():
            if not isinstance(shape, torch.Tensor):
                continue
            mine = own["state"][number][name] if is_root else torch.empty_like(shape, device=device)
            # The other ranks receive the tensor on the device of the parameters, so the root must send it from there,
            # even if it keeps the tensor elsewhere: Adam, for example, counts steps on the CPU.
            state[name] = collectives.broadcast_(mine.detach().to(device, copy=True), root_rank)
    if not is_root:
        optimizer.load_state_dict(theirs)


def outline(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with only the shape and type of each tensor, so that it is small when pickled.

    Example:
        >>> outline({"state": {0: {"step": 3, "sum": torch.ones(2)}}, "param_groups": []})["state"][0]["sum"].device
        device(type='meta')
    """
    shapes = {
        number: {
            name: torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value
            for name, value in of_one.items()
        }
        for number, of_one in state["state"].items()
    }
    return {**state, "state": shapes}
