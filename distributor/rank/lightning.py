"""Tell Lightning's Trainer and Fabric how many devices and nodes there are, so that wrong numbers are impossible.

Lightning counts data shards as ``devices * num_nodes``, and takes the device at the position of the local rank. Under a
launcher like this one it neither checks the product nor corrects it: numbers that do not fit leave out data, end with
an ``IndexError``, or train in each rank alone. Source: ``_AcceleratorConnector`` of pytorch-lightning 2.6,
``_Connector`` of its Fabric.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from distributor.rank.imports import on_import
from distributor.values.placement import Placement

#: Lightning's modules and classes that take ``devices`` and ``num_nodes``, in its distributions of different names.
_CONNECTORS = {
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning_fabric.connector": "_Connector",
    "lightning.fabric.connector": "_Connector",
}

#: The method of both classes that takes them, once strategy and accelerator are known.
_METHOD = "_check_device_config_and_set_final_flags"

#: Strategies that start processes by themselves, for notebooks. The ranks are these processes.
_STARTS_PROCESSES = re.compile(r"^(ddp|fsdp)_(spawn|fork|notebook)")


@dataclass(frozen=True)
class Numbers:
    """What Lightning is told: the arguments ``devices`` and ``num_nodes``.

    ``each_a_node`` says that it counts each rank as a node with one device, which is right for nodes with different
    numbers of ranks.
    """

    devices: Any
    num_nodes: int
    each_a_node: bool = False


def numbers(placement: Placement, local_rank: int, *, gpu: bool) -> Numbers:
    """Return the numbers for a rank.

    Args:
        placement: all nodes.
        local_rank: the rank's number on its node, and that of its GPU.
        gpu: whether it trains on a GPU.
    """
    groups = [placement.numbering(node) for node in placement.nodes]
    sizes = {group.local_world_size for group in groups}
    if len(sizes) == 1:
        return Numbers(sizes.pop(), groups[0].groups)
    return Numbers([local_rank] if gpu else 1, placement.world_size, each_a_node=True)


def wants_one_device(strategy: Any, devices: Any, num_nodes: int) -> bool:
    """Return whether code asks for a Trainer of this rank alone, for example to evaluate in one of the ranks.

    >>> wants_one_device("auto", 1, 1), wants_one_device("auto", "auto", 1), wants_one_device("ddp", 1, 1)
    (True, False, False)
    """
    if strategy == "auto":
        return num_nodes == 1 and (devices in (1, "1") or (isinstance(devices, list) and len(devices) == 1))
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    return "single" in name.lower()


class Fitting:
    """Gives Lightning the right numbers in this rank.

    Args:
        placement: all nodes.
        rank: the rank.
        local_rank: its number on its node.
    """

    def __init__(self, placement: Placement, rank: int, local_rank: int) -> None:
        self._placement = placement
        self._rank = rank
        self._local_rank = local_rank

    def watch(self) -> None:
        """Begin, if this process ever imports Lightning."""
        for module, name in _CONNECTORS.items():
            on_import(module, partial(self._wrap, name=name))

    def _wrap(self, module: Any, name: str) -> None:
        connector = getattr(module, name, None)
        method: Callable[..., None] | None = getattr(connector, _METHOD, None)
        if connector is None or method is None:
            return  # another version of Lightning, which gets the user's own numbers

        @wraps(method)
        def fitted(this: Any, devices: Any, num_nodes: int) -> None:
            fit = self._fit(this, devices, num_nodes)
            method(this, devices=fit.devices, num_nodes=fit.num_nodes)
            if fit.each_a_node:
                _give_own_device(this)

        setattr(connector, _METHOD, fitted)

    def _fit(self, connector: Any, devices: Any, num_nodes: int) -> Numbers:
        """Return the numbers for a Trainer or Fabric: its own if it has its own devices or cluster environment."""
        strategy, kind = connector._strategy_flag, _kind(connector)
        chosen = connector._cluster_environment_flag is not None or bool(connector._parallel_devices)
        if kind not in ("cpu", "cuda", "gpu") or chosen or wants_one_device(strategy, devices, num_nodes):
            return Numbers(devices, num_nodes)
        if isinstance(strategy, str):
            connector._strategy_flag = _STARTS_PROCESSES.sub(r"\1", strategy)
        fit = numbers(self._placement, self._local_rank, gpu=kind != "cpu")
        if self._rank == 0 and (devices, num_nodes) not in (("auto", 1), (fit.devices, fit.num_nodes)):
            told = f"devices={devices!r} and num_nodes={num_nodes!r} are taken as devices={fit.devices!r} and"
            print(f"[distributor] {told} num_nodes={fit.num_nodes}: so the ranks are placed", file=sys.stderr)
        return fit


def _kind(connector: Any) -> str:
    """Return the name of a connector's accelerator, which Lightning keeps as a name or an object.

    Fabric chooses an accelerator for ``"auto"``, its default, only after this; Trainer has chosen one before.
    """
    accelerator = connector._accelerator_flag
    if accelerator == "auto":
        return str(connector._choose_auto_accelerator())
    if isinstance(accelerator, str):
        return accelerator
    return type(accelerator).__name__.lower().removesuffix("accelerator")


def _give_own_device(connector: Any) -> None:
    """Make a connector's device that of its rank, whose ``LOCAL_RANK`` Lightning takes for the device's position."""
    choose = connector._set_parallel_devices_and_init_accelerator

    def chosen() -> None:
        choose()
        connector._parallel_devices = _Same(connector._parallel_devices)

    connector._set_parallel_devices_and_init_accelerator = chosen


class _Same(list[Any]):
    """A list of one item, which it has at each position."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0 if isinstance(index, int) else index)
