"""Finds the launch path that a command line selects with ``--launch`` or with an option such as ``--deepspeed``."""

from __future__ import annotations

from typing import Any

import rich_click as click

from distributor.cli.flags import own, words
from distributor.errors import ConfigurationError
from distributor.launch.registry import by_name
from distributor.values.launch_path import Launch
from distributor.values.options import WHAT

_ARGUMENTS = ("deepspeed", "trainer", "none")

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
        metavar=words(_ARGUMENTS),
        type=click.Choice(_ARGUMENTS),
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

#: The launch path of each option above, and its argument there. The first two select theirs even without ``--launch``.
_PATHS = {
    "deepspeed": ("deepspeed", "config"),
    "accelerate": ("accelerate", "config"),
    "script_arguments": ("deepspeed", "script_arguments"),
    "parameter_servers": ("tensorflow", "parameter_servers"),
    "evaluator": ("tensorflow", "evaluator"),
    "object_store_memory": ("ray", "object_store_memory"),
}


def choose(name: str | None, options: dict[str, Any]) -> Launch:
    """Return the launch path that the command line selects, and remove the options of all launch paths."""
    given = {option: value for option in _PATHS if (value := options.pop(option)) not in (None, False)}
    selecting = [option for option in given if option == _PATHS[option][0]]
    if name is None and len(selecting) > 1:
        raise ConfigurationError(
            f"--{' and --'.join(selecting)} select different ways to start the ranks: leave one of them out"
        )
    chosen = name or next(iter(selecting), "torchrun")
    for option, value in given.items():
        owner = _PATHS[option][0]
        if owner != chosen:
            flag = option.replace("_", "-")
            shown = f"--{flag}" if value is True else f"--{flag} {value}"
            raise ConfigurationError(
                f"--launch {chosen} takes no {shown}: leave one of them out"
                if option in selecting
                else f"{shown} is for --launch {owner}: add --launch {owner}, or leave {shown} out"
            )
    arguments = {_PATHS[option][1]: value for option, value in given.items()}
    if arguments.get("script_arguments") == "none":
        arguments["script_arguments"] = False
    return by_name(chosen, **arguments)
