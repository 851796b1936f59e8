"""The GPUs of a machine and how ranks see them, without importing torch.

A visible-devices variable is a mapping: with ``CUDA_VISIBLE_DEVICES=4,6`` the process's device 1 is the machine's
device 6. If an executor has such a variable, the GPU numbers that Spark assigns to its tasks are positions in the list.
Source: https://docs.nvidia.com/cuda/cuda-programming-guide/ (environment variables, CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from distributor.errors import ResourceError
from distributor.text.wording import count

#: Read in this order, and both set for ranks: AMD's HIP treats them as two names of one setting. AMD applies
#: ``ROCR_VISIBLE_DEVICES``, which is left unchanged, first: numbers count only the devices that it leaves visible.
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")

_NO_DEVICE = "-1"  # for AMD's HIP, to which an empty list is none at all

_PATIENCE = 60.0  # seconds: ``nvidia-smi`` is slow with many GPUs and no persistence daemon

#: Exit code without NVIDIA's driver. After others, CUDA may still work: an image may have an ``nvidia-smi`` that does
#: not fit the driver. Source: man nvidia-smi, RETURN VALUE.
_NOT_LOADED = 9

_DRIVER = "/proc/driver/nvidia/gpus"  # has a folder for each: a container may lack ``nvidia-smi``

_TOPOLOGY = "/sys/class/kfd/kfd/topology/nodes"  # of AMD's kernel driver

_LONGEST = 200  # characters of an error of ``nvidia-smi`` that is quoted


def visible_devices(environ: Mapping[str, str]) -> str | None:
    """Return the visible-devices setting of an environment, or ``None`` if the environment has none."""
    return next((environ[name] for name in VISIBLE_DEVICES if name in environ), None)


def numbered_by(machine: str, environ: Mapping[str, str]) -> str:
    """Return an identifier of the scope in which a number means one device; see :data:`VISIBLE_DEVICES` for AMD."""
    return f"{machine} {environ['ROCR_VISIBLE_DEVICES']}" if machine and "ROCR_VISIBLE_DEVICES" in environ else machine


def parse_visible(setting: str | None) -> tuple[str, ...] | None:
    """Return the device names of a visible-devices setting, in order; ``None`` without a setting: all are visible.

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

    A number is a position in ``visible``, the executor's own setting, if there is one. A UUID or MIG name stays
    unchanged.

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


@dataclass(frozen=True)
class Listing:
    """What ``nvidia-smi -L`` says of a machine's GPUs."""

    text: str  # for errors
    gpus: tuple[str, ...] | None = None  # UUIDs by number, "" for an unknown one; None without an answer
    migs: tuple[str, ...] = ()  # UUIDs
    hangs: bool = False  # it did not end


def local_gpus(environ: Mapping[str, str], ask: Callable[[], Listing] | None = None) -> tuple[str, ...]:
    """Return the GPUs that a process with this environment would see here, named as in ``CUDA_VISIBLE_DEVICES``."""
    visible = parse_visible(visible_devices(environ))
    if visible is not None:
        return present(visible, (ask or list_gpus)()) if visible and not has_amd() else visible
    below = parse_visible(environ.get("ROCR_VISIBLE_DEVICES"))
    if below is not None:
        return tuple(str(index) for index in range(len(below)))
    return tuple(str(index) for index in range(_count((ask or list_gpus)())))


def present(names: Sequence[str], listing: Listing) -> tuple[str, ...]:
    """Return the devices that a process sees if a visible-devices variable has these names.

    As in CUDA, these are the names before the first one that is not there. Without an answer of nvidia-smi, all count.

    >>> one = Listing("", ("GPU-8932f937",))
    >>> present(["0", "1"], one), present(["7", "0"], one), present(["GPU-89"], one)
    (('0',), (), ('GPU-89',))
    """
    return tuple(takewhile(lambda name: _is_present(name, listing), names))


def _is_present(name: str, listing: Listing) -> bool:
    """Return whether ``nvidia-smi`` lists a device, named by its number or by the beginning of its UUID."""
    if listing.gpus is None:
        return True
    if (number := re.match(r"\d+", name)) is not None:  # CUDA ignores what follows the number
        return int(number[0]) < len(listing.gpus)
    if "" in listing.gpus:
        return True
    if name.startswith("MIG-GPU-"):  # the older form, MIG-GPU-UUID/1/0: drivers still take it, and list another one
        return name.removeprefix("MIG-").partition("/")[0] in listing.gpus
    known = (*listing.gpus, *listing.migs) if name.startswith(("GPU-", "MIG-")) else ()
    return sum(uuid.startswith(name) for uuid in known) == 1


def described(environ: Mapping[str, str], listing: Listing) -> str:
    """Return in a few words which GPUs the environment names, and which ``nvidia-smi`` lists, for errors.

    >>> described({"CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "7"}, Listing("nvidia-smi lists 1 GPU"))
    'CUDA_VISIBLE_DEVICES=7, nvidia-smi lists 1 GPU'
    """
    names = [name for name in VISIBLE_DEVICES if name in environ][:1] or ["CUDA_VISIBLE_DEVICES"]
    names += [name for name in ("ROCR_VISIBLE_DEVICES",) if name in environ]
    settings = [f"{name}={environ[name] or repr('')}" if name in environ else f"{name} is not set" for name in names]
    return ", ".join([*settings, listing.text])


def list_gpus() -> Listing:
    """Return what ``nvidia-smi -L`` says of this machine's GPUs."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return Listing("there is no nvidia-smi")
    try:
        process = subprocess.Popen([nvidia_smi, "-L"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return Listing(f"nvidia-smi cannot be run: {error}")
    try:
        output, errors = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()  # and do not wait: a process that hangs in a driver may not even end then
        return Listing(f"{nvidia_smi} -L did not end within {_PATIENCE:g} s", hangs=True)
    if process.returncode != 0:
        answer = " ".join(f"{output}\n{errors}".split())
        text = f"nvidia-smi fails with exit code {process.returncode}{': ' if answer else ''}{answer[:_LONGEST]}"
        return Listing(text, () if process.returncode == _NOT_LOADED else None)
    gpus = tuple(re.findall(r"^GPU .*?(?:\(UUID: (\S+)\))?$", output, re.MULTILINE))
    migs = tuple(re.findall(r"^\s+MIG .*\(UUID: (\S+)\)$", output, re.MULTILINE))
    parts = f" with {count(len(migs), 'MIG device')}" if migs else ""
    return Listing(f"nvidia-smi lists {count(len(gpus), 'GPU') if gpus else 'no GPU'}{parts}", gpus, migs)


def _count(listing: Listing) -> int:
    """Return the number of GPUs that this machine's GPU driver reports; 0 if there is no GPU driver."""
    if listing.hangs:
        raise ResourceError(
            f"this machine's GPUs cannot be counted: {listing.text}. A GPU or its driver may be broken: run "
            "nvidia-smi, or pass use_gpu=False to train on CPUs"
        )
    known = len(listing.gpus) if listing.gpus is not None else len(list(Path(_DRIVER).glob("*")))
    return known or _count_amd(_TOPOLOGY)


def has_amd() -> bool:
    """Return whether AMD's kernel driver lists a GPU."""
    return _count_amd(_TOPOLOGY) > 0


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

    >>> rank_visibility(["4", "6"], True)["CUDA_VISIBLE_DEVICES"], rank_visibility([], False)["CUDA_VISIBLE_DEVICES"]
    ('4,6', '')
    """
    value = ",".join(gpus) if use_gpu else ""
    cuda, hip = VISIBLE_DEVICES
    return {cuda: value, hip: value or _NO_DEVICE}
