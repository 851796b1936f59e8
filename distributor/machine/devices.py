"""The GPUs of a machine and how ranks see them, without importing torch.

A visible-devices variable is a *mapping*: with ``CUDA_VISIBLE_DEVICES=4,6`` the process's device 1 is the machine's
device 6. If an executor has such a variable, the GPU numbers that Spark assigns to the executor's tasks are positions
in the variable's list. Source: https://docs.nvidia.com/cuda/cuda-programming-guide/ (environment variables,
CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from distributor.errors import ResourceError
from distributor.text.wording import count

#: The visible-devices variables. They are read in this order, and both are set for ranks: AMD's HIP treats them as two
#: names of one setting. AMD applies ``ROCR_VISIBLE_DEVICES`` before them; this package does not change that variable.
#: Numbers in the two variables count only the devices that ``ROCR_VISIBLE_DEVICES`` leaves visible.
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")

#: Number of seconds that ``nvidia-smi`` may take. It is slow if a machine has many GPUs and no persistence daemon.
_PATIENCE = 60.0


def visible_devices(environ: Mapping[str, str]) -> str | None:
    """Return the visible-devices setting of an environment, or ``None`` if the environment has none."""
    return next((environ[name] for name in VISIBLE_DEVICES if name in environ), None)


def numbered_by(machine: str, environ: Mapping[str, str]) -> str:
    """Return an identifier of the scope within which a device number always means the same device.

    The identifier consists of ``machine`` and, if ``ROCR_VISIBLE_DEVICES`` is set, the value of this variable: AMD
    numbers only the devices that this variable leaves visible.
    """
    return f"{machine} {environ['ROCR_VISIBLE_DEVICES']}" if machine and "ROCR_VISIBLE_DEVICES" in environ else machine


def parse_visible(setting: str | None) -> tuple[str, ...] | None:
    """Return the device names of a visible-devices setting, in order.

    Return ``None`` if the setting is ``None``: all devices are then visible.

    As in CUDA, everything from the first invalid entry on is ignored: ``"0,-1,1"`` shows only device 0.

    >>> parse_visible("4, 6"), parse_visible(""), parse_visible(None)
    (('4', '6'), (), None)
    """
    if setting is None:
        return None
    names: list[str] = []
    for name in (part.strip() for part in setting.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def through_mapping(addresses: Sequence[str], visible: Sequence[str] | None, host: str) -> tuple[str, ...]:
    """Return Spark's resource addresses as names for a visible-devices variable.

    ``visible`` is the executor's own visible-devices setting; ``None`` if it has none. An address that is a number is a
    position in ``visible``, and is replaced by the device at that position. Without ``visible``, it stays unchanged.
    An address that is a name (UUID, MIG) always stays unchanged.

    Raises:
        ResourceError: an address is a number, but ``visible`` has no entry at this position.

    >>> through_mapping(["1", "0"], ("4", "6"), "host-a"), through_mapping(["1"], None, "host-a")
    (('6', '4'), ('1',))
    """
    if visible is None:
        return tuple(addresses)
    mapped = []
    for address in addresses:
        if not address.isdecimal():
            mapped.append(address)
        elif int(address) < len(visible):
            mapped.append(visible[int(address)])
        else:
            raise ResourceError(
                f"Spark assigned GPU {address} on {host}, but only {count(len(visible), 'GPU')} can be seen there "
                f"({','.join(visible) or 'none'}): unset CUDA_VISIBLE_DEVICES for executors, or make the GPU "
                "discovery script report each GPU's position in CUDA_VISIBLE_DEVICES (0 for the first)"
            )
    return tuple(mapped)


def local_gpus(environ: Mapping[str, str], count: Callable[[], int] | None = None) -> tuple[str, ...]:
    """Return the GPUs that a process with this environment would see here, named as in ``CUDA_VISIBLE_DEVICES``.

    Args:
        environ: the environment of the process, usually ``os.environ``.
        count: counts the machine's GPUs; the default asks the GPUs' driver (``nvidia-smi -L``, or AMD's kernel driver).

    Raises:
        ResourceError: the GPUs cannot be counted.
    """
    visible = parse_visible(visible_devices(environ))
    if visible is not None:
        return visible
    below = parse_visible(environ.get("ROCR_VISIBLE_DEVICES"))
    if below is not None:
        return tuple(str(index) for index in range(len(below)))
    return tuple(str(index) for index in range((count or count_gpus)()))


def count_gpus() -> int:
    """Return the number of GPUs that this machine's GPU driver reports; 0 if there is no GPU driver.

    Raises:
        ResourceError: ``nvidia-smi`` does not end, as happens if a GPU is broken.
    """
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is not None:
        try:
            listing = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=_PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            raise ResourceError(
                f"this machine's GPUs cannot be counted: {nvidia_smi} -L did not end within {_PATIENCE:g} s. A GPU or "
                "its driver may be broken: run nvidia-smi, or pass use_gpu=False to train on CPUs"
            ) from None
        if listing.returncode == 0:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return _count_amd("/sys/class/kfd/kfd/topology/nodes")


def _count_amd(topology: str) -> int:
    """Count the GPUs that AMD's kernel driver lists. Its list also has CPUs; only GPUs have SIMD units."""
    count = 0
    for path in Path(topology).glob("*/properties"):
        try:
            properties = path.read_text()
        except OSError:  # a device that this container may not use
            continue
        count += re.search(r"^simd_count [1-9]", properties, re.MULTILINE) is not None
    return count


def rank_visibility(gpus: Sequence[str], use_gpu: bool) -> dict[str, str]:
    """Return the visible-devices variables for a node's ranks, with the node's GPUs in order of local rank.

    If the ranks use no GPUs, the variables make no GPU visible.

    >>> rank_visibility(["4", "6"], True)["CUDA_VISIBLE_DEVICES"], rank_visibility([], False)["CUDA_VISIBLE_DEVICES"]
    ('4,6', '')
    """
    value = ",".join(gpus) if use_gpu else ""
    return dict.fromkeys(VISIBLE_DEVICES, value)
