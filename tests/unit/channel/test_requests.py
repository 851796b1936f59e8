"""A node that sends the driver a file: how it takes the driver's answers."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import watch

from distributor.channel import connections, requests
from distributor.values.files import Entry
from distributor.values.messages import Message, Proceed, Received, Refused, Upload

ENTRY = Entry("model.pt", 7, 0o644, 10**18, "digest")


def answers(*told: Message) -> tuple[socket.socket, threading.Thread]:
    """The node's end of a connection to a driver that gives these answers, and asks for the file's bytes first."""
    ours, theirs = socket.socketpair()

    def drive() -> None:
        with theirs:
            connections.read(theirs)
            for each in told:
                theirs.sendall(connections.pack(each))
                if isinstance(each, Proceed):
                    theirs.recv(7, socket.MSG_WAITALL)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    return ours, thread


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ((Proceed(), Received()), None),
        ((Refused("too large"),), requests.RequestRefusedError("too large")),
        ((Proceed(), Refused("No space left on device")), requests.RequestRefusedError("No space left on device")),
        ((Proceed(), Proceed()), ConnectionError("unexpected answer from the driver: Proceed()")),
    ],
)
def test_what_the_driver_answers(
    told: tuple[Message, ...], error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the driver refuses after its last byte is refused, too: the connection works."""
    ours, thread = answers(*told)
    monkeypatch.setattr(requests, "connect", lambda *_: ours)
    (tmp_path / "model.pt").write_bytes(b"weights")
    found: Exception | None = None
    try:
        requests.send_file(("", 0, "", b""), Upload(ENTRY), str(tmp_path / "model.pt"), watch.DEADLINE)
    except Exception as raised:
        found = raised
    assert repr(found) == repr(error)
    thread.join(watch.DEADLINE)
    assert not thread.is_alive()
