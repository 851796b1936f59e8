"""Makes the command lines of this package's processes, changes what the kernel shows of them, and recognizes them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from distributor.machine.processes import stat
from distributor.values.environment import NODE_ID

# Fields of /proc/PID/stat (proc(5)): the addresses of the arguments and the environment that the process was started
# with. ps shows the current content of that memory, so a process can change what ps shows for it. A fork has its own
# copy of the memory.
_ARGUMENTS, _ENVIRONMENT = 45, 47

#: The signal at which a guard kills the agent that it guards.
END_SIGNAL = signal.SIGRTMIN + 14


def overwrite_argument(old: str, new: str) -> None:
    """Make the kernel show ``new`` in place of the argument ``old`` in this process's command line.

    ``new`` must not be longer than ``old``.
    """
    _overwrite("cmdline", _ARGUMENTS, old.encode(), new.encode())


def overwrite_environ(old: str, new: str) -> None:
    """Make the kernel show ``new`` in place of ``old`` (``NAME=value``) in this process's environment.

    Other processes then read ``new`` in ``/proc/PID/environ``. This process's own ``os.environ`` does not change.
    ``new`` must not be longer than ``old``.
    """
    _overwrite("environ", _ENVIRONMENT, old.encode(), new.encode())


def _overwrite(file: str, field: int, old: bytes, new: bytes) -> None:
    if len(new) > len(old):
        raise ValueError(f"the kernel cannot show {new!r} in place of {old!r} for this process: the new text is longer")
    with open(f"/proc/self/{file}", "rb") as shown:
        at = (b"\0" + shown.read()).index(b"\0" + old + b"\0")
    fields = stat(os.getpid())
    assert fields is not None
    ctypes.memmove(int(fields[field]) + at, new.ljust(len(old), b"\0"), len(old))


#: Modules that are started as processes, by the name that the command line shows.
_PARTS = {
    "warm": "distributor.node.warm",
    "agent": "distributor.node.agent",
    "launcher": "distributor.node.launcher",
    "rank": "distributor.rank.process",
    "companion": "distributor.node.companion",
    "uploads": "distributor.node.uploads",
    "accelerate": "distributor.launch.accelerate.variables",
}

#: The word that a keeper's command line shows in place of "agent". A keeper is a fork of an agent. It keeps the states
#: of ranks after the agent has ended; see :mod:`distributor.node.keeper`.
KEEPER = "keep"

#: Code for ``python -c``. It imports the package from a given path. Neither files beside the package nor files in the
#: current directory can shadow other modules. If a shell ignores SIGCHLD, the processes that it starts ignore it too,
#: and cannot wait for their children. The code therefore resets the signal to its default.
_BOOTSTRAP = f"""
PARTS = {_PARTS}
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
root, part, *args = sys.argv[1:]
sys.path[:] = [path for path in sys.path if path]
import importlib.util, os
at = root + "/distributor"
if not os.path.isdir(at):  # in a zip
    sys.path.insert(0, root)
else:
    spec = importlib.util.spec_from_file_location("distributor", at + "/__init__.py", submodule_search_locations=[at])
    sys.modules["distributor"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["distributor"])
importlib.import_module(PARTS[part]).main(*args)
"""


def is_part(pid: int, part: str) -> bool:
    """Return whether a process, judged by its command line, runs the given part of this package, such as ``agent``."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as shown:
            arguments = shown.read().split(b"\0")
    except OSError:
        return False
    return arguments[1:2] == [b"-c"] and arguments[4:5] == [part.encode()]


def command(root: str, part: str, *args: str) -> list[str]:
    """Return the command line that runs ``main(*args)`` of a part of this package, such as ``agent``.

    This package is imported from ``root``, a folder or a zip file.
    """
    return [sys.executable, "-c", _BOOTSTRAP, root, part, *args]


#: An argument of a warm process, which has imported torch and forks agents. The argument leaves room for the
#: arguments that the forks show in its place.
PLACEHOLDER = "-" * 40


#: An environment entry of a warm process, which has imported torch and forks agents. In its place, the forks show their
#: node's ID.
UNMARKED = f"{NODE_ID}=".ljust(80, "-")


def title(part: str, argument: object = PLACEHOLDER) -> str:
    """Return the command-line arguments that identify a process of this package.

    The first argument names the part of the package that the process runs, such as ``agent``. The second argument is a
    value; for a launcher, it is the pid of the launcher's agent. NULs pad these arguments to a length that is the same
    for all processes, so that a fork can show its own arguments in place of those that it has inherited.
    """
    return f"{part}\0{argument}".ljust(len(f"warm\0{PLACEHOLDER}"), "\0")
