"""Find out which variables ``accelerate launch`` would set for a configuration, with Accelerate's own functions.

The driver need not import Accelerate for this. Source: ``launch_command`` in ``accelerate/commands/launch.py``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

#: Prefixes of the configuration's variables. Those for ranks, ports, threads and devices are set by the run itself.
PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")


def main(config: str, num_processes: str, use_gpu: str) -> None:
    """Print what :func:`answer` returns as JSON, in the output's last line."""
    print(f"\n{json.dumps(answer(config, num_processes, use_gpu == 'True'))}")


def answer(config: str, num_processes: str, use_gpu: bool) -> dict[str, Any]:
    """Return the path of a configuration, its variables, and the settings that the driver checks."""
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    launch.is_fp8_available = lambda: True  # nodes may have packages for FP8 that the driver lacks
    if not config and os.path.isfile(default_config_file):  # Accelerate finds it by itself
        config = default_config_file
    file = ["--config_file", config] if config else []
    shape = ["--num_processes", num_processes, "--num_machines", "1", "--main_process_port", "0", "--gpu_ids", "all"]
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
