"""MPICH's messages between processes and its process manager, as far as they are read and changed here.

Source: the PMI-1 protocol; ``src/pmi/src/pmi_wire.c`` of MPICH.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from distributor.launch.mpi.programs import SHIM

#: Keys of ``MPI_Info`` that choose hosts. The manager would wait for daemons there, which it cannot start.
_HOSTS = (b"host", b"hosts", b"hostfile")

_ABORT = re.compile(rb"cmd=abort\b[^\n]*\bexitcode=(-?\d+)")

_COUNTS = re.compile(rb"^(totspawns|spawnssofar)=(\d+)$", re.MULTILINE)


def aborts(message: bytes) -> bytes | None:
    """Return the exit code that a process has passed to ``MPI_Abort``, if the message says so.

    >>> aborts(b"cmd=abort exitcode=7\\n"), aborts(b"cmd=finalize\\n")
    (b'7', None)
    """
    match = _ABORT.search(message)
    return None if match is None else match[1]


def asks_for_topology(message: bytes) -> bool:
    """Return whether a process asks for the machine's description, a file that a killed daemon leaves in ``/tmp``."""
    return b"key=PMI_hwloc_xmlfile" in message


def spawns(message: bytes) -> bool:
    """Return whether a message, or the beginning of one, asks to spawn processes.

    >>> spawns(b"mcmd=spawn\\nnprocs=2\\n"), spawns(b"cmd=get key=mcmd=spawn\\n")
    (True, False)
    """
    return message.startswith(b"mcmd=spawn\n")


def is_whole(message: bytes) -> bool:
    """Return whether all parts of a request to spawn have arrived, one for each program.

    >>> first = b"mcmd=spawn\\ntotspawns=2\\nspawnssofar=1\\nendcmd\\n"
    >>> is_whole(first), is_whole(first + first.replace(b"far=1", b"far=2"))
    (False, True)
    """
    counts = dict(_COUNTS.findall(message))
    return message.endswith(b"\nendcmd\n") and counts.get(b"totspawns") == counts.get(b"spawnssofar")


def through_shims(message: bytes) -> bytes:
    """Return a request to spawn, changed so that shims start, with each process's directory and command."""
    return b"".join(line + b"\n" for part in _parts(message) for line in _through_shim(part))


def _parts(message: bytes) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    for line in message.splitlines():
        part.append(line)
        if line == b"endcmd":
            yield part
            part = []


def _through_shim(part: list[bytes]) -> Iterator[bytes]:
    fields = dict(line.split(b"=", 1) for line in part if b"=" in line)
    info = {value: fields[key.replace(b"key", b"val")] for key, value in fields.items() if key.startswith(b"info_key_")}
    command = b"/".join([info[b"path"], fields[b"execname"]] if b"path" in info else [fields[b"execname"]])
    first = [*(word.encode() for word in SHIM[1:]), info.get(b"wdir", b"."), command]
    for line in part:
        key, _, value = line.partition(b"=")
        if key == b"execname":
            yield b"execname=" + SHIM[0].encode()
        elif key == b"argcnt":
            yield b"argcnt=%d" % (int(value) + len(first))
            yield from (b"arg%d=%b" % (number, word) for number, word in enumerate(first, 1))
        elif key.startswith(b"info_key_") and value in (b"path", b"wdir", *_HOSTS):
            yield key + b"=distributor-" + value  # the manager ignores keys that it does not know
        else:
            yield line
