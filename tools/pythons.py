"""Try other Pythons: ``pythons.py run 3.12`` in fresh clones, ``pythons.py resolve 3.12`` without installing anything.

Interpreters are the system's Python, ``python3.12`` on the PATH, and pyenv's; ``3.11`` means all its patch releases.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from environment import CONSTRAINTS, PURPOSES, ROOT, gigabytes, requirements, version_of


def candidates(version: str) -> Iterator[Path]:
    """Yield the paths where an interpreter of a version may be."""
    yield Path("/usr/bin/python3")
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield Path(folder, f"python{version}")
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(root.glob(f"versions/{version}.*/bin/python3"))


def interpreters(version: str) -> dict[str, Path]:
    """Return the interpreters of a version such as 3.11 by their full version, except those of virtual environments."""
    found: dict[str, Path] = {}
    for path in candidates(version):
        told = version_of(path)
        if told is not None and told.startswith(f"{version}.") and not (path.parent.parent / "pyvenv.cfg").exists():
            found.setdefault(told, path)
    return found


def run(python: Path, told: str) -> None:
    """Run the demo in a fresh clone, then the smoke test with DeepSpeed; print the demo's time and the size."""
    with tempfile.TemporaryDirectory(prefix="distributor-clone-") as folder:
        clone = Path(folder, "clone")
        call(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)])
        began = time.monotonic()
        call(["make", "-C", str(clone), "demo", f"PYTHON={python}"])
        seconds, size = time.monotonic() - began, gigabytes(clone / ".venvs/main")
        call(["make", "-C", str(clone), ".venvs/main/demo-deepspeed.ok", f"PYTHON={python}"])
        unset, own = clone / "tools/unset.py", clone / ".venvs/main/bin/python"
        call([str(python), str(unset), str(own), str(clone / "tools/smoke.py")])
        print(f"=== Python {told}: make demo took {seconds:.0f} s, .venvs/main had {size:.1f} GB", flush=True)


def resolve(python: Path, told: str) -> None:
    """Let pip find versions of the packages that ``make test`` and ``make bench`` need, in a new environment."""
    with tempfile.TemporaryDirectory(prefix="distributor-resolve-") as folder:
        call([str(python), "-m", "venv", folder])
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        constraints = ["--constraint", str(CONSTRAINTS / "main.txt")]
        call([*pip, *constraints, "pip"])
        wanted = [word for name in ("test", "bench") for word in requirements(PURPOSES[name])]
        call([*pip, "--dry-run", *constraints, *wanted])
    print(f"=== Python {told}: the pinned versions can be installed", flush=True)


def call(command: Sequence[str]) -> None:
    """Run a command without this environment's variables about Python and make.

    If this process is interrupted, kill the command and the processes that it has started, which write to the clone.

    Raises:
        SystemExit: the command has failed.
    """
    environ = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS")
    }
    with subprocess.Popen(command, env=environ, start_new_session=True) as process:
        try:
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code != 0:
        sys.exit(f"{' '.join(command)} has failed with exit code {code}")


def main(what: str, *versions: str) -> None:
    """Run or resolve with each interpreter of each version; print which versions are missing."""
    for version in versions:
        found = interpreters(version)
        if not found:
            print(f"=== Python {version}: skipped, since there is no python{version} on this machine", flush=True)
        if what == "run":  # make's other commands try the Python that runs this
            found = {told: python for told, python in found.items() if told != platform.python_version()} or found
        for told, python in found.items():
            print(f"=== Python {told} ({python})", flush=True)
            {"run": run, "resolve": resolve}[what](python, told)


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("git is needed for fresh clones")
    # Temporary folders are removed on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main(*sys.argv[1:])
