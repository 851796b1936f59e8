"""The line between an agent and who started it."""

import json
import os
import pickle
import socket
import struct
import subprocess
import threading
import zipfile

import pytest
from hypothesis import given, strategies as st

from distributor.channel import control
from distributor.machine import bootstrap
from distributor.schedulers.hosting import report
from distributor.values.messages import Rest


@pytest.fixture
def line():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([{"report": b"\0\1", "values": {0: "path"}}], id="one"),
        pytest.param([None, [], "text", {"a": (1, 2.5)}], id="several"),
        # More than a socket's buffers: the sender is still at it while the receiver reads.
        pytest.param([{"job": os.urandom(1 << 16) * 200}, "after"], id="large"),
    ],
)
def test_round_trip(line, messages):
    ours, theirs = line

    def send_all():
        for message in messages:
            control.send(theirs, message)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [control.receive(ours) for _ in messages] == messages
    sender.join()


MESSAGE = pickle.dumps({"text": "x" * 20}, protocol=5)
PACKED = struct.pack("!Q", len(MESSAGE)) + MESSAGE


def test_the_wire_format():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            control.send(theirs, {"text": "x" * 20})
        assert ours.recv(1 << 12) == PACKED


@given(st.integers(0, len(PACKED) - 1))
def test_an_end_before_the_end_of_a_message(length):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(PACKED + PACKED[:length])
        assert control.receive(ours) == {"text": "x" * 20}
        assert control.receive(ours) is None
        assert control.receive(ours) is None


def test_a_reset_is_an_end(line):
    ours, theirs = line
    ours.sendall(b"unread")
    theirs.close()  # with something unread: the kernel resets the connection
    assert control.receive(ours) is None


def test_sending_to_nobody_is_an_os_error(line):
    ours, theirs = line
    theirs.close()
    with pytest.raises(OSError):
        control.send(ours, "hello")


def test_pieces_and_rest_of_files(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    assert list(report.pieces(str(path), 4, 1)) == [b"1234", b"5678", b"9"]
    files = [Rest(3, 2, str(path), 6)]
    assert list(report.rest(files, 3)) == [(3, 2, 6, b"678"), (3, 2, 9, b"9")]


PROBE = """
import json, sys
def main(*args):
    print(json.dumps({"path": sys.path, "args": args, "json": json.__file__}))
"""
SHADOW = "raise ImportError('shadowed')"


@pytest.fixture
def roots(tmp_path):
    """A package of our name with a module that tells where it runs, as a zip and as a folder beside a trap."""
    zipped, folder = tmp_path / "package.zip", tmp_path / "root"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("distributor/__init__.py", "")
        archive.writestr("distributor/node/__init__.py", "")
        archive.writestr("distributor/node/agent.py", PROBE)
    (folder / "distributor" / "node").mkdir(parents=True)
    (folder / "distributor" / "__init__.py").write_text("")
    (folder / "distributor" / "node" / "__init__.py").write_text("")
    (folder / "distributor" / "node" / "agent.py").write_text(PROBE)
    (folder / "json.py").write_text(SHADOW)
    return {"zip": str(zipped), "folder": str(folder)}


@pytest.mark.parametrize(("kind", "on_path"), [("zip", 1), ("folder", 0)])
def test_the_package_is_imported_from_its_root_and_shadows_nothing(roots, tmp_path, kind, on_path):
    cwd = tmp_path / "cwd"
    (cwd / "distributor").mkdir(parents=True)
    (cwd / "distributor" / "__init__.py").write_text(SHADOW)
    (cwd / "json.py").write_text(SHADOW)
    python, *rest = bootstrap.command(roots[kind], "agent", "4711", "control=3")
    another = tmp_path / "another"
    (another / "distributor").mkdir(parents=True)
    (another / "distributor" / "__init__.py").write_text(SHADOW)
    env = {**os.environ, "PYTHONPATH": str(another)}
    done = subprocess.run([python, "-S", *rest], cwd=cwd, env=env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["args"] == ["4711", "control=3"]
    assert told["path"].count(roots[kind]) == on_path
    assert not {"", str(cwd)} & set(told["path"])
