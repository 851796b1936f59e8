"""Create a virtual environment, or add to one, for a make command: ``environment.py .venv demo``."""

from __future__ import annotations

import configparser
import fcntl
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

#: Number of seconds between lines about the progress of an installation.
INTERVAL = 10.0

#: The first version of pip that can report the progress of a download.
TELLING_PIP = (24, 1)


class Purpose(NamedTuple):
    """What a make command needs.

    Args:
        extras: the extras in setup.cfg.
        size: size of the environment in gigabytes, with torch for CPUs if the package is installed.
        package: whether the package itself is needed, and so torch.
        constraints: the file that pins the versions.
        alone: packages that are installed last and without their dependencies, because these ask for another torch.
            An extra names what they really need.
    """

    extras: tuple[str, ...]
    size: float
    package: bool = True
    constraints: str = "constraints.txt"
    alone: tuple[str, ...] = ()


PURPOSES: dict[str, Purpose] = {
    "lint": Purpose(("lint",), 0.1, package=False),
    "docs": Purpose(("docs",), 0.2, package=False),
    "types": Purpose(("spark", "types"), 1.6),
    "demo": Purpose(("spark", "demo"), 1.8),
    "demo-deepspeed": Purpose(("deepspeed",), 1.2),
    "bench": Purpose(("spark", "deepspeed", "bench"), 1.8),
    "test": Purpose(("connect", "deepspeed", "demo", "docs", "integrations", "lint", "notebook", "test", "types"), 2.9),
    "vision": Purpose(("spark", "notebook", "test-vision"), 2.1),
    "launchers": Purpose(("spark", "test-launchers"), 4.0),
    "streaming": Purpose(("spark", "test-streaming"), 2.0, constraints="constraints-streaming.txt"),
    "composer": Purpose(
        ("spark", "notebook", "test-composer"),
        3.3,
        constraints="constraints-composer.txt",
        alone=("mosaicml", "llm-foundry"),
    ),
    "axolotl": Purpose(
        ("spark", "test-axolotl"),
        4.2,
        constraints="constraints-axolotl.txt",
        alone=("axolotl", "axolotl-contribs-lgpl", "unsloth", "unsloth_zoo"),
    ),
    "versions": Purpose(("connect", "test-versions"), 1.8),
}

#: How much more disk space torch for CUDA takes than torch for CPUs, in gigabytes.
CUDA = 4.0


def requirements(purpose: Purpose, settings: str) -> list[str]:
    """Return pip's arguments for a purpose.

    Args:
        purpose: what to install.
        settings: the text of setup.cfg.
    """
    if purpose.package:
        return ["--editable", f"{ROOT}[{','.join(purpose.extras)}]"]
    known = configparser.ConfigParser()
    known.read_string(settings)
    extras = known["options.extras_require"]
    return [line.strip() for extra in purpose.extras for line in extras[extra].splitlines() if line.strip()]


def pinned(constraints: str, others: Mapping[str, str]) -> str:
    """Return constraints that have other versions in place of some.

    >>> pinned("torch==2.13.0\\npyspark==4.3.0", {"pyspark": "4.0.5"})
    'torch==2.13.0\\npyspark==4.0.5'
    """
    kept = (line for line in constraints.splitlines() if line.partition("==")[0] not in others)
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in others.items())])


def announcement(name: str, folder: Path, version: str) -> str:
    """Return a line that says what is about to be installed, and how large it is.

    >>> print(announcement("lint", Path(".venv"), "3.11.2"))
    .venv, Python 3.11.2: installs what lint needs, 0.1 GB
    """
    purpose = PURPOSES[name]
    text = f"{folder}, Python {version}: installs what {name} needs, {purpose.size:.1f} GB"
    if not purpose.package or os.environ.get("TORCH_INDEX") or any(folder.glob("lib/*/site-packages/torch")):
        return text
    return (
        f"{text} with torch for CPUs, {purpose.size + CUDA:.1f} GB with torch for CUDA, which pip's default index has "
        f"(for CPUs: TORCH_INDEX=URL, see https://pytorch.org/get-started/locally/)"
    )


def activity(line: str, before: str) -> str:
    """Return what pip is doing after it has written a line.

    Args:
        line: a line of pip's output.
        before: what pip was doing until then.
    """
    words = line.split()
    if line.startswith("Collecting "):
        return f"finds versions, now of {words[1]}"
    if line.startswith("Downloading "):
        return f"downloads {' '.join([words[1].rpartition('/')[2].partition('-cp3')[0], *words[2:]])}"
    if progress := re.fullmatch(r"Progress (\d+) of (\d+)", line):
        return f"{before.partition(': ')[0]}: {100 * int(progress[1]) // max(1, int(progress[2]))} %"
    if line.startswith("Building "):
        return line.partition(":")[0].lower().replace("building", "builds")
    if line.startswith("Installing collected packages:"):
        return f"unpacks {len(words) - 3} packages"
    return before


def gigabytes(folder: Path) -> float:
    """Return what a folder takes on disk."""
    # Files may go while it looks: that is no matter.
    found = subprocess.run(
        ["du", "-sk", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    return int(found.stdout.split()[0]) * 1024 / 1e9


def pip(folder: Path, arguments: Sequence[str], log: Path) -> None:
    """Run pip, and print every few seconds what it is doing. Its output goes to a file.

    Args:
        folder: the environment.
        arguments: the arguments of pip.
        log: the file to which pip's output is appended.

    Raises:
        SystemExit: pip has failed.
    """
    state = {"doing": "starts"}
    began = time.monotonic()
    # -I: pip takes no packages of PYTHONPATH for installed ones.
    command = [str(folder / "bin" / "python"), "-I", "-m", "pip", "--disable-pip-version-check", *arguments]
    with log.open("a") as kept:
        process = subprocess.Popen(command, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                state["doing"] = activity(line.strip(), state["doing"])
                if not line.startswith("Progress "):
                    kept.write(line)

        reader = threading.Thread(target=read)
        reader.start()
        while True:
            reader.join(INTERVAL)
            if not reader.is_alive():
                break
            say(f"{time.monotonic() - began:5.0f} s, {gigabytes(folder):.1f} GB: {state['doing']}")
        code = process.wait()
    if code != 0:
        tail = [line for line in log.read_text().splitlines() if line.strip()][-15:]
        say("\n".join(["pip has failed; the last lines of its output:", *tail]))
        sys.exit(f"pip could not install what is needed (exit code {code}): {log} has all of its output")


def version_of(python: Path) -> str | None:
    """Return the version of an environment's Python; ``None`` if it does not exist or does not run."""
    try:
        ended = subprocess.run(
            [str(python), "-c", "import platform; print(platform.python_version())"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def pip_version(python: Path) -> tuple[int, ...] | None:
    """Return the version of an environment's pip; ``None`` if the environment has no pip."""
    ended = subprocess.run(
        [str(python), "-I", "-m", "pip", "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    found = re.match(r"pip (\d+)\.(\d+)", ended.stdout)
    return None if found is None else tuple(int(part) for part in found.groups())


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
    if there is None or pip_version(python) is None:
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
    versions.read(ROOT / "versions.cfg")
    if name == "versions" and not versions.has_section(folder.name):
        sys.exit(f"versions.cfg has no {folder.name}: it has {', '.join(versions.sections())}")
    python = make(folder)
    say(announcement(name, folder, version_of(python) or ""))
    log = folder / f"{name}.log"
    log.write_text("")
    began = time.monotonic()
    pins = folder / f"{name}.txt"
    others = versions[folder.name] if versions.has_section(folder.name) else {}
    pins.write_text(pinned((ROOT / purpose.constraints).read_text(), others))
    constraints = ["--constraint", str(pins)]
    pip(folder, ["install", "--progress-bar", "off", *constraints, "pip"], log)
    bar = ["--progress-bar", "raw" if (pip_version(python) or (0,)) >= TELLING_PIP else "off"]
    index = os.environ.get("TORCH_INDEX")
    if purpose.package and index:
        pip(folder, ["install", *bar, *constraints, "--index-url", index, "torch"], log)
    pip(folder, ["install", *bar, *constraints, *requirements(purpose, (ROOT / "setup.cfg").read_text())], log)
    if purpose.alone:
        pip(folder, ["install", *bar, *constraints, "--no-deps", *purpose.alone], log)
    (folder / f"{name}.ok").touch()
    say(f"{folder} is ready for {name}: {time.monotonic() - began:.0f} s, {gigabytes(folder):.1f} GB")


def say(text: str) -> None:
    """Print a line without buffering."""
    print(text, flush=True)


def main(folder: str, name: str) -> None:
    """Install, while no other make command does: two would write into the same environment."""
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting: another make command is installing in this folder")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        install(Path(folder), name)
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command to continue")


if __name__ == "__main__":
    main(*sys.argv[1:])
