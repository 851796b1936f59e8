"""Check, before the ranks run the user's code, that all nodes see the same folder or URL for checkpoints."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from distributor.checkpoint.context import Session, current
from distributor.errors import StartError

_WHAT = "the check of checkpoints="

_STOPPED = 60.0  # seconds within which a rank is stopped after another one has failed

_VISIBLE = 10.0  # seconds within which other nodes must see a file; NFS may show it late


def check_place(*, local_rank: int) -> None:
    """Raise a StartError unless this node can write to the place of checkpoints, and sees what node 0 writes there.

    All ranks call this function; one rank of each node does the check.
    """
    try:
        session = current(_WHAT)
    except OSError as error:
        raise StartError(f"checkpoints: the folder or URL cannot be used: {error}") from None
    name = f".distributor-{session.origin}"
    key, rank = session.next_key(), session.exchange.rank
    problem = _write(session, name) if rank == 0 else ""
    try:
        session.exchange.gather(f"{key}/1", b"", _WHAT)
        written = json.loads(session.exchange.share(f"{key}/1", [json.dumps(problem).encode()], _WHAT))
        if not written and local_rank == 0 and rank > 0:
            problem = _look(session, name)
        problems = session.exchange.gather(f"{key}/2", problem.encode(), _WHAT)
        failed = session.exchange.share(f"{key}/2", [b"failed" if any(problems) else b""], _WHAT)
    finally:
        if rank == 0:
            with suppress(OSError):
                session.storage.remove(name)
    if problem:
        raise StartError(problem)
    if failed:
        time.sleep(_STOPPED)  # this rank is stopped before it runs the user's code: another rank says why
        raise StartError(f"{_WHAT} has failed on another node")


def _write(session: Session, name: str) -> str:
    """On node 0, write a file for other nodes to find. Return an error text or ``""``."""
    where = session.settings.checkpoints.dir
    try:
        session.check_fence()
        session.storage.write(name, b"")
        if session.storage.size(name) is None:
            return f"checkpoints {where!r} cannot be used: a file that was written there cannot be found"
    except OSError as error:
        return f"checkpoints {where!r} cannot be used: {error}"
    return ""


def _look(session: Session, name: str) -> str:
    """On another node, look for the file of node 0, and then write one. Return an error text or ``""``."""
    where = session.settings.checkpoints.dir
    own = f"{name}-{session.exchange.rank}"
    deadline = time.monotonic() + _VISIBLE
    try:
        while session.storage.size(name) is None:
            if time.monotonic() > deadline:
                first = session.settings.hosts.get(0, "node 0")
                return (
                    f"checkpoints {where!r} is not the same folder on this node as on {first}: a file that {first} has "
                    "written does not appear here. Pass a folder that all nodes share, or a URL"
                )
            time.sleep(0.05)
        session.storage.write(own, b"")
        session.storage.remove(own)
    except OSError as error:
        return f"checkpoints {where!r} cannot be used: {error}"
    return ""
