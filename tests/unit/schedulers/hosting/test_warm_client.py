from __future__ import annotations

import os
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

from distributor.schedulers.hosting import warm_client


def test_the_oldest_beyond_three_are_told_to_end() -> None:
    """Those of the same owner, also if the oldest was killed."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))  # a socket's path must be short
        listeners = {}
        for age, name in enumerate(("mine-killed", "mine-a", "mine-b", "mine-c", "mine-d", "others-e")):
            folder = place / name
            folder.mkdir()
            (folder / "token").write_bytes(b"t" * 32)
            listeners[name] = listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(folder / "socket"))
            listener.listen()
            listener.setblocking(False)
            os.utime(folder / "socket", (age, age))
        listeners.pop("mine-killed").close()
        warm_client._retire_oldest(str(place / "mine-d"))
        told = []
        for name, listener in listeners.items():
            try:
                listener.accept()[0].close()
                told.append(name)
            except BlockingIOError:
                pass
        assert told == ["mine-a"]
