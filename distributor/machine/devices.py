"""The GPUs of a machine and how ranks see them, without importing torch.

A visible-devices variable is a *mapping*: with ``CUDA_VISIBLE_DEVICES=4,6`` the process's device 1 is the machine's
device 6. Spark's resource addresses index that mapping where it is present.
Source: https://docs.nvidia.com/cuda/cuda-programming-guide/ (environment variables, CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from distributor.errors import ResourceError

#: Read in this order, and both set for ranks: AMD's HIP takes them as two names of one setting.
#: ``ROCR_VISIBLE_DEVICES`` filters below them and is left as it is; HIP counts within what it leaves.
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def visible_devices(environ: Mapping[str, str]) -> str | None:
    """The visible-devices setting of an environment, ``None`` if there is none."""
    return next((environ[name] for name in VISIBLE_DEVICES if name in environ), None)


def numbered_by(machine: str, environ: Mapping[str, str]) -> str:
    """A name for where numbers of devices mean the same ones: a machine, and what AMD's lower filter leaves of it."""
    return f"{machine} {environ['ROCR_VISIBLE_DEVICES']}" if machine and "ROCR_VISIBLE_DEVICES" in environ else machine


def parse_visible(setting: str | None) -> tuple[str, ...] | None:
    """Device names of a visible-devices setting, in order; ``None`` if unset (all devices are visible).

    As CUDA does, everything from the first invalid entry on is ignored: ``"0,-1,1"`` shows only device 0.

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
    """Spark's resource addresses as names to put into a visible-devices variable.

    An index goes through the mapping; a name (UUID, MIG) stays as it is.

    Raises:
        ResourceError: an index is beyond the mapping.

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
                f"Spark gave GPU {address} on {host}, but only {len(visible)} are visible there "
                f"({','.join(visible) or 'none'}): unset CUDA_VISIBLE_DEVICES for executors, or let the discovery "
                "script report indices into it"
            )
    return tuple(mapped)


def local_gpus(environ: Mapping[str, str], count: Callable[[], int] | None = None) -> tuple[str, ...]:
    """The GPUs that a process with this environment would see on this machine, as visible-devices names.

    Args:
        environ: usually ``os.environ``.
        count: counts the machine's GPUs; by default asks the driver (``nvidia-smi -L``, or AMD's kernel driver).
    """
    visible = parse_visible(visible_devices(environ))
    if visible is not None:
        return visible
    below = parse_visible(environ.get("ROCR_VISIBLE_DEVICES"))
    if below is not None:
        return tuple(str(index) for index in range(len(below)))
    return tuple(str(index) for index in range((count or count_gpus)()))


def count_gpus() -> int:
    """GPUs of this machine as its driver reports them; 0 where no driver is."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is not None:
        listing = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=60, check=False)
        if listing.returncode == 0:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return _count_amd("/sys/class/kfd/kfd/topology/nodes")


def _count_amd(topology: str) -> int:
    """AMD's kernel driver lists CPUs and GPUs as nodes; GPUs are those with SIMD units."""
    count = 0
    for path in Path(topology).glob("*/properties"):
        try:
            properties = path.read_text()
        except OSError:  # a device that this container may not use
            continue
        count += re.search(r"^simd_count [1-9]", properties, re.MULTILINE) is not None
    return count


def rank_visibility(gpus: Sequence[str], use_gpu: bool) -> dict[str, str]:
    """Visible-devices variables for a node's ranks: its GPUs in order of local rank, or none at all.

    >>> rank_visibility(["4", "6"], True)["CUDA_VISIBLE_DEVICES"], rank_visibility([], False)["CUDA_VISIBLE_DEVICES"]
    ('4,6', '')
    """
    value = ",".join(gpus) if use_gpu else ""
    return dict.fromkeys(VISIBLE_DEVICES, value)
