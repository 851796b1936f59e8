"""Advice on failures that the driver can explain better than a rank, since it knows the job and the user's files."""

from __future__ import annotations

import os
import re
import shlex
import socket
from pathlib import Path

from distributor.shipping import modules
from distributor.values import layout
from distributor.values.job import Job, Module, Script
from distributor.values.outcome import Failure

_NO_MODULE = re.compile(r"(?:No module named|import of module) '?(?P<name>\w+(?:\.\w+)*)")
_NO_NAME = re.compile(
    r"cannot import name '(?P<name>\w+)' from '(?P<imported>[\w.]+)'|"
    r"module '(?P<module>[\w.]+)' has no attribute '(?P<attribute>\w+)'"
)
_NO_GPU = re.compile(
    r"'?torch\._C'? has no attribute '_cuda_|not compiled with CUDA enabled|No CUDA GPUs are available|"
    r"Found no NVIDIA driver|Attempting to deserialize object on a CUDA device|"
    r"Cannot access accelerator device when none is available|doesn't have NCCL built in|"
    r"ProcessGroupNCCL is only supported with GPUs|"
    # Unsloth takes an empty HIP_VISIBLE_DEVICES, which hides GPUs, for a sign of an AMD GPU.
    r"Unsloth detected signs of an AMD ROCm GPU|Unsloth cannot find any torch accelerator"
)
#: A file beside the node's copy of a script.
_BESIDE = re.compile(rf"/{layout.PREFIX}[^/]+/{layout.SCRIPT}/(.+)")
#: Asserts that there is a GPU, in a traceback. The error's message need not mention it.
_ASSERTS_GPU = re.compile(r"^\s*assert torch\.cuda\.(is_available|device_count)\(", re.MULTILINE)
_DEVICE_IDS = "DistributedDataParallel device_ids and output_device arguments only work with"
_NO_OPERATORS = "operator torchvision::nms does not exist"
_NO_PACKAGE = "attempted relative import with no known parent package"
_NO_LAUNCH = "To use Fabric with more than one device, you must call `.launch()`"
#: Names of mosaicml-streaming's shared memory (``streaming/base/shared/prefix.py``).
_SHARED = re.compile(r"File exists: '/\d{6}_\w+'")
_NO_FILE = re.compile(r"No such file or directory: '(?P<path>.+?)'")


def advise(failure: Failure, job: Job, *, local: bool = False) -> str:
    """Return advice on the root failure; ``""`` if there is nothing to add. ``local``: ranks had the driver's files."""
    if text := job.launch.advise(failure, job):
        return text
    if not job.resources.use_gpu and (text := _about_gpu(failure)):
        return text
    if _NO_LAUNCH in failure.message:
        return (
            "The code is written for fabric run, which tells Lightning that the processes already run: pass "
            'env={"LT_CLI_USED": "1"} (--env LT_CLI_USED=1), or call launch() in the code'
        )
    if _NO_OPERATORS in failure.message:
        return (
            "torchvision was built for another torch, for example torchvision for CUDA and torch for CPUs: install "
            "both from the same index"
        )
    if failure.kind == "FileExistsError" and _SHARED.search(failure.message) and job.training.local_ranks != "host":
        return (
            "Ranks of several executors on one host used the same name for shared memory, because each executor "
            'numbers its ranks from LOCAL_RANK 0: pass local_ranks="host" (--local-ranks host)'
        )
    if _NO_PACKAGE in failure.message and isinstance(job.target, Script):
        return _about_package(job.target.path)
    if local:
        return ""
    kinds = ("ModuleNotFoundError", "ImportError", "PicklingError")
    if failure.kind in kinds and (match := _NO_MODULE.search(failure.message)):
        return _about_module(match["name"], failure, job)
    if failure.kind in ("ImportError", "AttributeError") and (match := _NO_NAME.search(failure.message)):
        return _about_name(match["module"] or match["imported"], match["name"] or match["attribute"], job)
    if failure.kind == "FileNotFoundError" and (match := _NO_FILE.search(failure.message)):
        return _about_file(match["path"], failure, job)
    return ""


def _about_gpu(failure: Failure) -> str:
    """Return advice on code that demands a GPU, for ranks on CPUs."""
    if _DEVICE_IDS in failure.message:
        return (
            "The code passes device_ids to DistributedDataParallel (device_ids is for GPUs), but with use_gpu=False "
            "ranks see no GPU: pass use_gpu=True (--use-gpu), or leave out device_ids on CPUs"
        )
    counts = failure.kind == "ZeroDivisionError" and "device_count()" in failure.traceback
    asserts = failure.kind == "AssertionError" and _ASSERTS_GPU.search(failure.traceback)
    if counts or asserts or _NO_GPU.search(failure.message):
        return (
            "The code asks for a GPU, but with use_gpu=False ranks see none: pass use_gpu=True (--use-gpu), or let the "
            'code choose ("cuda" and "nccl" if torch.cuda.is_available() else "cpu" and "gloo")'
        )
    return ""


def _about_module(name: str, failure: Failure, job: Job) -> str:
    here = [] if job.working_dir is None else [job.working_dir.path]
    if isinstance(job.target, Script):
        here.append(os.path.dirname(job.target.path))
    if isinstance(job.target, Module):
        here.append(os.getcwd())
    package = name.partition(".")[0]
    spec = modules.find(package, here)
    if spec is None or modules.find(name, here) is None:
        asked = isinstance(job.target, Module) and job.target.name == name
        where = "" if job.working_dir is None else f"working_dir {job.working_dir.path}, "
        where += f"the current directory {os.getcwd()} or on Python's path"
        return f"{name} is not on the driver either: it is not in {where}" if asked else ""
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    archive = next((path for path in modules.archives() if places and places[0].startswith(path + os.sep)), None)
    if archive is not None:
        return f"{package} is in {archive} on the driver: give executors the file, too (spark.submit.pyFiles)"
    if not places or not os.path.exists(places[0]):  # a built-in module
        return ""
    if spec.loader is None and not any(entry.endswith(".py") for entry in os.listdir(places[0])):  # no Python files
        return ""
    target = modules.target_folder(places[0])
    if target is None and modules.is_installed(places[0]):
        return (
            f"{package} is installed on the driver, but not on {failure.host}: install it there, or ship an "
            "environment that has it (spark.archives)"
        )
    folder = target or os.path.dirname(os.path.abspath(places[0]))
    if job.working_dir is not None and job.working_dir.path == folder:
        return ""
    return f"{package} is on the driver, in {folder}. {_ship(folder)}"


def _about_name(module: str, name: str, job: Job) -> str:
    """Return advice on a name that ranks lack of a module, of which they have what the function uses."""
    loaded = next((each for each in modules.own_modules() if each.__name__ == module), None)
    path = Path(modules.places(loaded)[0]).with_suffix("") if loaded is not None and hasattr(loaded, name) else Path()
    path = path.parent if path.name == "__init__" else path
    parts = module.split(".")
    if path.parts[-len(parts) :] != tuple(parts):  # its folder does not tell from where it is imported
        return ""
    folder = str(path.parents[len(parts) - 1])
    if job.working_dir is not None and job.working_dir.path == folder:
        return ""
    return f"{module} is on the driver, in {folder}; ranks have only what the function uses of it. {_ship(folder)}"


def _about_package(script: str) -> str:
    """Return advice on a script with relative imports, which needs to be run as a module of its package."""
    path = Path(script).with_suffix("")
    folder = next((parent for parent in path.parents[1:] if not (parent / "__init__.py").exists()), path.parent)
    module = ".".join(path.relative_to(folder).parts)
    return (
        f"The script has relative imports, so run it as a module of its package: pass working_dir={str(folder)!r} and "
        f"call run_module({module!r}) (--working-dir {shlex.quote(str(folder))} -m {module})"
    )


def _about_file(path: str, failure: Failure, job: Job) -> str:
    if isinstance(job.target, Script) and (shipped := _BESIDE.search(path)) is not None:
        folder = os.path.dirname(os.path.abspath(job.target.path))
        if os.path.exists(os.path.join(folder, shipped[1])):
            return f"{shipped[1]} is on the driver, in {folder}, beside the script. {_ship(folder)}"
    try:
        if os.stat(path).st_ctime >= failure.time:  # the file was created or changed after the failure
            return ""
    except OSError:
        return ""
    if os.path.isabs(path):
        if failure.host == socket.gethostname():  # the rank ran on the driver's host, and saw the same files
            return ""
        return (
            f"{path} is on the driver, but was not found on {failure.host}: put it on storage that all hosts share, or "
            "into the project folder that you pass as working_dir="
        )
    here = os.getcwd()
    if job.working_dir is None:
        return f"{path} is in the driver's current directory, {here}. {_ship(here)}"
    if job.working_dir.path == here:
        return ""
    return (
        f"{path} is in the driver's current directory, {here}, but ranks run in working_dir, {job.working_dir.path}: "
        "copy it there"
    )


def _ship(folder: str) -> str:
    return f"To ship it to executors, pass working_dir={folder!r} (--working-dir {shlex.quote(folder)})"
