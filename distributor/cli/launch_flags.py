"""Finds the launch path that a command line selects with ``--launch`` or with an option such as ``--deepspeed``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rich_click as click

import distributor.launch as paths
from distributor.cli.flags import own
from distributor.errors import ConfigurationError
from distributor.launch import NAMES, tensorflow
from distributor.launch.accelerate.launch import Accelerate
from distributor.launch.deepspeed.launch import DeepSpeed
from distributor.launch.ray.launch import Ray
from distributor.values.launch_path import Launch
from distributor.values.options import WHAT

#: Options that each belong to one launch path. They follow ``--launch`` in the help.
OPTIONS = (
    own(WHAT, "--deepspeed", metavar="FILE", type=click.Path(), help="Train with DeepSpeed and this configuration."),
    own(
        WHAT,
        "--accelerate",
        metavar="FILE",
        type=click.Path(),
        help="Train with Accelerate and this file, which the command accelerate config has written.",
    ),
    own(
        WHAT,
        "--script-arguments",
        type=click.Choice(("deepspeed", "trainer", "none")),
        help="With DeepSpeed: how the script gets its configuration: --deepspeed --deepspeed_config PATH, as with "
        "DeepSpeed's own launcher (default); --deepspeed PATH, for Hugging Face's TrainingArguments; or not at all.",
    ),
    own(
        WHAT,
        "--parameter-servers",
        metavar="N",
        type=int,
        help="With --launch tensorflow: number of processes that are parameter servers.",
    ),
    own(WHAT, "--evaluator", is_flag=True, help="With --launch tensorflow: the last process is an evaluator."),
    own(
        WHAT,
        "--object-store-memory",
        metavar="SIZE",
        help="With --launch ray: the size of each node's object store, such as 2g.",
    ),
)

#: The launch path of each option above. The first two select theirs even without ``--launch``.
_PATHS = {
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "script_arguments": "deepspeed",
    "parameter_servers": "tensorflow",
    "evaluator": "tensorflow",
    "object_store_memory": "ray",
}


def choose(name: str | None, options: dict[str, Any]) -> Launch:
    """Return the launch path that the command line selects, and remove the options of all launch paths."""
    given = {option: value for option in _PATHS if (value := options.pop(option)) not in (None, False)}
    selecting = [option for option in given if option == _PATHS[option]]
    if name is None and len(selecting) > 1:
        raise ConfigurationError(
            f"--{' and --'.join(selecting)} select different ways to start the ranks: leave one of them out"
        )
    chosen = name or next(iter(selecting), "torchrun")
    for option, value in given.items():
        if _PATHS[option] != chosen:
            flag = option.replace("_", "-")
            shown = f"--{flag}" if value is True else f"--{flag} {value}"
            raise ConfigurationError(
                f"--launch {chosen} takes no {shown}: leave one of them out"
                if option in selecting
                else f"{shown} is for --launch {_PATHS[option]}: add --launch {_PATHS[option]}, or leave {shown} out"
            )
    return _path(chosen, given)


def _path(name: str, given: Mapping[str, Any]) -> Launch:
    if name == "deepspeed":
        kind: Any = given.get("script_arguments", "deepspeed")
        return DeepSpeed(given.get("deepspeed"), script_arguments=False if kind == "none" else kind)
    if name == "accelerate":
        return Accelerate(given.get("accelerate"))
    if name == "tensorflow":
        return tensorflow.TensorFlow(given.get("parameter_servers", 0), given.get("evaluator", False))
    if name == "ray":
        return Ray(given.get("object_store_memory"))
    path: Launch = getattr(paths, NAMES[name])()
    return path
