"""Makes the command lines of this package's processes, changes what the kernel shows of them, and recognizes them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Literal

from distributor.machine.processes import stat
from distributor.values.environment import NODE_ID

# Fields of /proc/PID/stat (proc(5)): the addresses of the arguments and the environment. ps shows the current content
# of that memory, of which a fork has its own copy.
_ARGUMENTS, _ENVIRONMENT = 45, 47

#: The signal at which a guard kills the agent that it guards.
END_SIGNAL = signal.SIGRTMIN + 14


def overwrite(old: str, new: str, file: Literal["cmdline", "environ"] = "cmdline") -> None:
    """Make the kernel show ``new``, which must not be longer, in place of an argument or environment entry ``old``.

    ``sys.argv`` and ``os.environ`` do not change.
    """
    before, after = old.encode(), new.encode()
    if len(after) > len(before):
        raise ValueError(f"the kernel cannot show {new!r} in place of {old!r} for this process: the new text is longer")
    with open(f"/proc/self/{file}", "rb") as shown:
        at = (b"\0" + shown.read()).index(b"\0" + before + b"\0")
    fields = stat(os.getpid())
    assert fields is not None
    start = int(fields[_ARGUMENTS if file == "cmdline" else _ENVIRONMENT])
    ctypes.memmove(start + at, after.ljust(len(before), b"\0"), len(before))


#: Modules that are started as processes, by the name that the command line shows.
PARTS = {
    "warm": "distributor.node.warm",
    "agent": "distributor.node.agent",
    "launcher": "distributor.node.launcher",
    "rank": "distributor.rank.process",
    "companion": "distributor.node.companion",
    "uploads": "distributor.node.url_writer",
    "starter": "distributor.scoring.model_starter",
    "model": "distributor.scoring.model_server",
    "accelerate": "distributor.launch.accelerate.variables",
}

#: The parts that a warm process forks, with ``serve`` of their modules. They end by themselves if it is killed.
FORKED = ("agent", "model")

KEEPER = "keep"  # shown in place of "agent" by a fork of an agent; see :mod:`distributor.node.state_keeper`

#: Code for ``python -c``. Files beside the package or in the current directory cannot shadow other modules. SIGCHLD is
#: reset, because processes whose shell ignores it inherit this, and cannot wait for their children. The collector is
#: off meanwhile, which makes imports of torch a seventh faster.
_BOOTSTRAP = f"""
PARTS = {PARTS}
import gc, signal, sys
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
gc.disable()
main = importlib.import_module(PARTS[part]).main
gc.enable()
main(*args)
"""


def is_part(pid: int, *parts: str) -> bool:
    """Return whether a process, judged by its command line, runs one of these parts of this package."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as shown:
            arguments = shown.read().split(b"\0")
    except OSError:
        return False
    return arguments[1:2] == [b"-c"] and arguments[4:5] in [[part.encode()] for part in parts]


def command(root: str, part: str, *args: str) -> list[str]:
    """Return the command line that runs ``main(*args)`` of a part, from the package in ``root``, a folder or a zip."""
    return [sys.executable, "-c", _BOOTSTRAP, root, part, *args]


#: An argument of a warm process. In its place, its forks show theirs.
PLACEHOLDER = "-" * 40

#: An environment entry of a warm process. In its place, its forks show their node's ID.
UNMARKED = f"{NODE_ID}=".ljust(80, "-")


def title(part: str, argument: object = PLACEHOLDER) -> str:
    """Return the arguments that identify a process: its part, and a value, such as the pid of a launcher's agent.

    NULs pad them to a length that is the same for all processes, so that a fork can show its own arguments in place of
    those that it has inherited.
    """
    return f"{part}\0{argument}".ljust(len(f"warm\0{PLACEHOLDER}"), "\0")
