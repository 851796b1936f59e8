"""A node that sends the driver a file: how it takes the driver's answers."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import watch

from distributor.channel import lines, task
from distributor.values.files import Entry
from distributor.values.messages import Deposit, Message, Proceed, Received, Refused

ENTRY = Entry("model.pt", 7, 0o644, 10**18, "digest")


def answers(*told: Message) -> tuple[socket.socket, threading.Thread]:
    """The node's end of a connection to a driver that gives these answers, and asks for the file's bytes first."""
    ours, theirs = socket.socketpair()

    def drive() -> None:
        with theirs:
            lines.read(theirs)
            for each in told:
                theirs.sendall(lines.pack(each))
                if isinstance(each, Proceed):
                    theirs.recv(7, socket.MSG_WAITALL)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    return ours, thread


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ((Proceed(), Received()), None),
        ((Refused("too large"),), task.RefusedError("too large")),
        ((Proceed(), Refused("No space left on device")), task.RefusedError("No space left on device")),
        ((Proceed(), Proceed()), ConnectionError("unexpected answer from the driver: Proceed()")),
    ],
)
def test_what_the_driver_answers(
    told: tuple[Message, ...], error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the driver refuses after its last byte is refused, too: the connection works."""
    ours, thread = answers(*told)
    monkeypatch.setattr(task, "connect", lambda *_: ours)
    (tmp_path / "model.pt").write_bytes(b"weights")
    found: Exception | None = None
    try:
        task.send_file(("", 0, "", b""), Deposit(ENTRY), str(tmp_path / "model.pt"), watch.DEADLINE)
    except Exception as raised:
        found = raised
    assert repr(found) == repr(error)
    thread.join(watch.DEADLINE)
    assert not thread.is_alive()
