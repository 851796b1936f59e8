"""Say in one sentence why this interpreter cannot create an environment for distributor; say nothing if it can.

This file runs on Python 3.6 and later, and needs only the standard library.
"""

import platform
import sys
from typing import List, Optional, Sequence

#: The first Python that works, and the first with which the pinned versions were not tried.
OLDEST, UNTRIED = (3, 11), (3, 14)


def problem(version: Sequence[int], system: str, missing: Sequence[str], path: str) -> Optional[str]:
    """Return why an interpreter cannot be used, and what to do; ``None`` if it can.

    Args:
        version: ``sys.version_info``.
        system: ``platform.system()``.
        missing: the standard library's modules for creating environments that the interpreter lacks.
        path: path of the interpreter.
    """
    this = "Python {} ({})".format(".".join(str(part) for part in version), path)
    oldest, newest = f"3.{OLDEST[1]}", f"3.{UNTRIED[1] - 1}"
    another = f"name another one, such as: make demo PYTHON=python{newest}"
    if system != "Linux":
        name = "macOS" if system == "Darwin" else system
        return f"distributor needs Linux, but this is {name}: use a Linux machine or a container (docker/README.md)"
    if tuple(version[:2]) < OLDEST:
        return f"{this} is too old: distributor needs {oldest} or later. Install it, and {another}"
    if tuple(version[:2]) >= UNTRIED:
        return f"{this} is too new: the pinned versions were tried on {oldest} to {newest}. Install one, and {another}"
    if missing:
        return (
            f"{this} cannot make virtual environments, it lacks {' and '.join(missing)}: install them "
            f"(Debian and Ubuntu: apt-get install python3-venv), or {another}"
        )
    return None


def lacking() -> List[str]:
    """Return the missing modules that create environments; Debian has them in a separate package."""
    found = []
    for name in ("venv", "ensurepip"):
        try:
            __import__(name)
        except ImportError:
            found.append(name)
    return found


if __name__ == "__main__":
    sys.exit(problem(sys.version_info[:3], platform.system(), lacking(), sys.executable))
