"""Give Lightning's Trainer and Fabric the right numbers of devices and nodes, even if the code passes wrong ones.

Lightning splits data into ``devices * num_nodes`` shards, and each rank uses the device whose index is its local rank.
Under an external launcher, it does not check these numbers: with wrong ones, data is skipped, an ``IndexError`` is
raised, or each rank trains alone. Source: ``_AcceleratorConnector`` of pytorch-lightning 2.6, Fabric's ``_Connector``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from distributor.machine.imports import on_import
from distributor.values.placement import Share

# The classes that take ``devices`` and ``num_nodes``, in all packages that contain Lightning.
_CONNECTORS = {
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning_fabric.connector": "_Connector",
    "lightning.fabric.connector": "_Connector",
}

_METHOD = "_check_device_config_and_set_final_flags"  # called once strategy and accelerator are known

_STARTS_PROCESSES = re.compile(r"^(ddp|fsdp)_(spawn|fork|notebook)")  # in a run, ranks are these processes


@dataclass(frozen=True)
class Numbers:
    """The arguments ``devices`` and ``num_nodes`` that Lightning gets."""

    devices: Any
    num_nodes: int
    each_a_node: bool = False  # nodes have different numbers of ranks, which Lightning does not expect


def numbers(placement: Share, local_rank: int, *, gpu: bool) -> Numbers:
    """Return the numbers that a rank gives to Lightning. ``local_rank`` is also the number of the rank's GPU."""
    if placement.even:
        return Numbers(placement.numbering.local_world_size, placement.numbering.groups)
    return Numbers([local_rank] if gpu else 1, placement.world_size, each_a_node=True)


def wants_one_device(strategy: Any, devices: Any, num_nodes: int) -> bool:
    """Return whether user code asks for a Trainer for this rank alone, for example to evaluate on one of the ranks.

    >>> wants_one_device("auto", 1, 1), wants_one_device("auto", "auto", 1), wants_one_device("ddp", 1, 1)
    (True, False, False)
    """
    if strategy == "auto":
        return num_nodes == 1 and (devices in (1, "1") or (isinstance(devices, list) and len(devices) == 1))
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    return "single" in name.lower()


class Fitting:
    """Corrects the ``devices`` and ``num_nodes`` that Lightning is given in this rank."""

    def __init__(self, placement: Share, rank: int, local_rank: int) -> None:
        self._placement = placement
        self._rank = rank
        self._local_rank = local_rank

    def watch(self) -> None:
        """From now on, replace wrong ``devices`` and ``num_nodes`` of Lightning. Lightning need not be imported yet."""
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
        """Return the ``devices`` and ``num_nodes`` that a Trainer or a Fabric gets in this rank.

        The user's own stay with a cluster environment, a strategy that has ``parallel_devices``, one device for this
        rank alone, or an accelerator other than CPUs and CUDA GPUs.
        """
        strategy, kind = connector._strategy_flag, _kind(connector)
        chosen = connector._cluster_environment_flag is not None or bool(connector._parallel_devices)
        if kind not in ("cpu", "cuda", "gpu") or chosen or wants_one_device(strategy, devices, num_nodes):
            return Numbers(devices, num_nodes)
        if isinstance(strategy, str):
            connector._strategy_flag = _STARTS_PROCESSES.sub(r"\1", strategy)
        fit = numbers(self._placement, self._local_rank, gpu=kind != "cpu")
        if self._rank == 0 and (devices, num_nodes) not in (("auto", 1), (fit.devices, fit.num_nodes)):
            told = f"devices={devices!r} and num_nodes={num_nodes!r} are taken as devices={fit.devices!r} and"
            print(f"[distributor] {told} num_nodes={fit.num_nodes}, which is how the ranks are placed", file=sys.stderr)
        return fit


def _kind(connector: Any) -> str:
    """Return the accelerator's name. Unlike a Trainer's, a Fabric's may be ``"auto"`` still."""
    accelerator = connector._accelerator_flag
    if accelerator == "auto":
        return str(connector._choose_auto_accelerator())
    if isinstance(accelerator, str):
        return accelerator
    return type(accelerator).__name__.lower().removesuffix("accelerator")


def _give_own_device(connector: Any) -> None:
    """Make Lightning use the only device in its list of devices, although it asks for the one at ``LOCAL_RANK``."""
    choose = connector._set_parallel_devices_and_init_accelerator

    def chosen() -> None:
        choose()
        connector._parallel_devices = _Same(connector._parallel_devices)

    connector._set_parallel_devices_and_init_accelerator = chosen


class _Same(list[Any]):
    """A list that returns its first item for every index."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0 if isinstance(index, int) else index)
