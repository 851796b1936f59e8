"""Install what a make command needs into an environment of its own: ``environment.py .venvs/main/demo.ok``."""

from __future__ import annotations

import configparser
import fcntl
import os
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints"


class Purpose(NamedTuple):
    """What a make command needs."""

    groups: tuple[str, ...]  # of pyproject.toml's dependency groups
    size: float  # GB of the environment, with torch for CPUs if the package is installed
    extras: tuple[str, ...] | None = ()  # of the package; None: not even the package, and so no torch
    constraints: str = "main"  # the file that pins the versions
    alone: tuple[str, ...] = ()  # installed without their dependencies, since these ask for another torch


PURPOSES: dict[str, Purpose] = {
    "lint": Purpose(("lint",), 0.1, None),
    "docs": Purpose(("docs",), 0.2, None),
    "types": Purpose(("types",), 1.6, ("spark",)),
    "demo": Purpose(("demo",), 1.8, ("spark",)),
    "demo-deepspeed": Purpose((), 1.2, ("deepspeed",)),
    "bench": Purpose(("bench",), 1.8, ("spark", "deepspeed")),
    "test": Purpose(
        ("demo", "docs", "integrations", "lint", "notebook", "test", "types"), 2.9, ("connect", "deepspeed")
    ),
    "versions": Purpose(("test-versions",), 1.8, ("connect",)),
    "vision": Purpose(("notebook", "test-vision"), 2.1, ("spark",)),
    "launchers": Purpose(("test-launchers",), 4.0, ("spark",)),
    "mlflow": Purpose(("test-mlflow",), 2.1, ("spark", "mlflow", "sweep"), "mlflow"),
    "streaming": Purpose(("test-streaming",), 2.0, ("spark",), "streaming"),
    "composer": Purpose(("notebook", "test-composer"), 3.3, ("spark",), "composer", ("mosaicml", "llm-foundry")),
    "axolotl": Purpose(
        ("test-axolotl",), 4.2, ("spark",), "axolotl", ("axolotl", "axolotl-contribs-lgpl", "unsloth", "unsloth_zoo")
    ),
}

#: How much more disk space torch for CUDA takes than torch for CPUs, in gigabytes.
CUDA = 4.0


def requirements(purpose: Purpose) -> list[str]:
    """Return pip's arguments for a purpose.

    >>> requirements(PURPOSES["lint"])
    ['ruff>=0.6']
    """
    package = [] if purpose.extras is None else ["--editable", f"{ROOT}[{','.join(purpose.extras)}]"]
    return [*package, *(need for name in purpose.groups for need in group(name))]


def group(name: str) -> list[str]:
    """Return the packages of a dependency group; pip's own ``--group`` is younger than the pip of many Pythons."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"][name]
    return [word for need in needs for word in ([need] if isinstance(need, str) else group(need["include-group"]))]


def pinned(constraints: str, others: Mapping[str, str]) -> str:
    """Return constraints that have other versions in place of some.

    >>> pinned("torch==2.13.0\\npyspark==4.3.0", {"pyspark": "4.0.5"})
    'torch==2.13.0\\npyspark==4.0.5'
    """
    kept = (line for line in constraints.splitlines() if line.partition("==")[0] not in others)
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in others.items())])


def announcement(name: str, folder: Path, version: str) -> str:
    """Return a line that says what is about to be installed, and how large it is.

    >>> print(announcement("lint", Path(".venvs/main"), "3.11.2"))
    .venvs/main, Python 3.11.2: installs what lint needs, 0.1 GB
    """
    purpose = PURPOSES[name]
    text = f"{folder}, Python {version}: installs what {name} needs, {purpose.size:.1f} GB"
    if purpose.extras is None or os.environ.get("TORCH_INDEX") or any(folder.glob("lib/*/site-packages/torch")):
        return text
    return (
        f"{text} with torch for CPUs, {purpose.size + CUDA:.1f} GB with torch for CUDA, which pip's default index has "
        f"(for CPUs: TORCH_INDEX=URL, see https://pytorch.org/get-started/locally/)"
    )


def gigabytes(folder: Path) -> float:
    """Return what a folder takes on disk; its files may go meanwhile."""
    found = subprocess.run(
        ["du", "-sk", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    return int(found.stdout.split()[0]) * 1024 / 1e9


def pip(folder: Path, *arguments: str) -> None:
    """Run an environment's pip, whose output is shown: what it collects, downloads and installs.

    Raises:
        SystemExit: pip has failed.
    """
    # -I: pip takes no packages of PYTHONPATH for installed ones.
    # --no-compile: Python compiles what is imported, which is a small part of what large packages have.
    command = [str(folder / "bin" / "python"), "-I", "-m", "pip", "--disable-pip-version-check", "install"]
    code = subprocess.run([*command, "--no-compile", *arguments], cwd=str(ROOT), check=False).returncode
    if code != 0:
        sys.exit(f"pip could not install what is needed (exit code {code}): its output is above")


def output(command: Sequence[str]) -> str | None:
    """Return what a command prints; ``None`` if it cannot run or fails."""
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def version_of(python: Path) -> str | None:
    """Return the version of an environment's Python; ``None`` if it does not exist or does not run."""
    return output([str(python), "-c", "import platform; print(platform.python_version())"])


def make(folder: Path) -> Path:
    """Return the Python of an environment. Create the environment if it does not exist or has no pip.

    Raises:
        SystemExit: the environment cannot be created or used.
    """
    python = folder / "bin" / "python"
    there = version_of(python)
    if there is None and python.is_symlink():
        sys.exit(f"{python} does not run, since its interpreter is gone: remove {folder} (make clean) and start again")
    here = platform.python_version()
    if there is not None and there.split(".")[:2] != here.split(".")[:2]:
        sys.exit(
            f"{folder} has Python {there}, but PYTHON is {here}: pass the PYTHON with which {folder} was made, "
            "or remove it first (make clean)"
        )
    if there is None or output([str(python), "-I", "-m", "pip", "--version"]) is None:
        ended = subprocess.run(
            [sys.executable, "-m", "venv", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode != 0:
            sys.exit(f"{sys.executable} could not make a virtual environment in {folder}: {ended.stdout.strip()}")
    return python


def install(folder: Path, name: str) -> None:
    """Install the packages that a make command needs into an environment."""
    purpose = PURPOSES[name]
    versions = configparser.ConfigParser()
    versions.read(CONSTRAINTS / "versions.cfg")
    if name == "versions" and not versions.has_section(folder.name):
        sys.exit(f"constraints/versions.cfg has no {folder.name}: it has {', '.join(versions.sections())}")
    python = make(folder)
    say(announcement(name, folder, version_of(python) or ""))
    began = time.monotonic()
    pins = folder / f"{name}.txt"
    others = versions[folder.name] if versions.has_section(folder.name) else {}
    pins.write_text(pinned((CONSTRAINTS / f"{purpose.constraints}.txt").read_text(), others))
    constraints = ("--constraint", str(pins))
    pip(folder, "--quiet", *constraints, "pip")
    index = os.environ.get("TORCH_INDEX")
    if purpose.extras is not None and index:
        pip(folder, *constraints, "--index-url", index, "torch")
    pip(folder, *constraints, *requirements(purpose))
    if purpose.alone:
        pip(folder, *constraints, "--no-deps", *purpose.alone)
    (folder / f"{name}.ok").touch()
    say(f"{folder} is ready for {name}: {time.monotonic() - began:.0f} s, {gigabytes(folder):.1f} GB")


def say(text: str) -> None:
    """Print a line without buffering."""
    print(text, flush=True)


def main(target: str) -> None:
    """Install, while no other make command does: two would write into the same environment."""
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting: another make command is installing in this folder")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        install(Path(target).parent, Path(target).stem)
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command to continue")


if __name__ == "__main__":
    main(*sys.argv[1:])
