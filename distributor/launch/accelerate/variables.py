"""Finds out which environment variables ``accelerate launch`` would set for a configuration.

The driver runs this module in a separate process, so that the driver itself need not import Accelerate. The process
calls the same functions of Accelerate as ``accelerate launch`` does. Source: ``launch_command`` in
``accelerate/commands/launch.py``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

#: Prefixes of the variables that hold the configuration. This package itself sets the other variables that ``accelerate
#: launch`` sets (for ranks, ports, threads and devices).
PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")


def main(config: str, num_processes: str, use_gpu: str) -> None:
    """Print the result of :func:`answer` as JSON in the last line of the output.

    The driver runs this function in a separate process.
    """
    print(f"\n{json.dumps(answer(config, num_processes, use_gpu == 'True'))}")


def answer(config: str, num_processes: str, use_gpu: bool) -> dict[str, Any]:
    """Return an Accelerate configuration's path, the variables that it sets, and the settings that the driver checks.

    Args:
        config: path of the configuration file; "" for the file that Accelerate finds by itself, if there is one.
        num_processes: number of ranks.
        use_gpu: whether the run has GPUs.
    """
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    launch.is_fp8_available = lambda: True  # nodes may have packages for FP8 that the driver lacks
    if not config and os.path.isfile(default_config_file):
        config = default_config_file
    file = ["--config_file", config] if config else []
    shape = ["--num_processes", num_processes, "--num_machines", "1", "--main_process_port", "0"]
    sys.argv = ["accelerate", "launch"]  # Accelerate's parser reads sys.argv
    arguments = launch_command_parser().parse_args([*file, *shape, *([] if use_gpu else ["--cpu"]), "train.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    arguments.mpirun_hostfile = None  # Accelerate must not look for hosts: Spark provides the nodes
    prepare = launch.prepare_multi_gpu_env if use_gpu else launch.prepare_simple_launcher_cmd_env
    prepared = prepare(arguments)
    after = prepared if use_gpu else prepared[1]
    kind = getattr(defaults, "distributed_type", "NO")
    where = getattr(defaults, "compute_environment", "LOCAL_MACHINE")
    return {
        "config": config,
        "kind": getattr(kind, "value", kind),
        "where": getattr(where, "value", where),
        "use_cpu": bool(getattr(defaults, "use_cpu", False)),
        "variables": {name: value for name, value in after.items() if name.startswith(PREFIXES)},
    }
