"""The line between nodes: what an agent keeps for ranks of other nodes, and what it refuses."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import watch

from distributor.channel import connections, peers
from distributor.channel.connections import Endpoint
from distributor.channel.tls import make_peer_key
from distributor.machine import state_folders
from distributor.node import replica_store
from distributor.values.checkpoints import PEERS, PeerKey, SharedMemory
from distributor.values.messages import Copy, Proceed, Recall, Refused

LIMIT = 1 << 20
RUN = "3f2a0c0ffee0"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A node's folder in a shared memory of the test's own."""
    monkeypatch.setattr(state_folders, "FOLDER", str(tmp_path))
    made = tmp_path / f"distributor-{RUN}-abcd1234"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def key() -> PeerKey:
    return make_peer_key()


@pytest.fixture
def node(folder: Path, key: PeerKey) -> Iterator[Endpoint]:
    """An agent that serves the folder."""
    server = replica_store.serve(RUN, key, SharedMemory(str(folder), LIMIT, True), "127.0.0.1")
    yield "127.0.0.1", server._listener.getsockname()[1], key.certificate, key.token
    server.close()
    server.join(watch.DEADLINE)
    assert not server.is_alive()


def state(tmp_path: Path, size: int = 300_000) -> Path:
    """A file of tensors of a rank of another node."""
    path = tmp_path / "tensors"
    path.write_bytes(os.urandom(size))
    return path


def test_a_copy_arrives_and_is_read_back(node: Endpoint, folder: Path, tmp_path: Path) -> None:
    path = state(tmp_path)
    data = path.read_bytes()
    parts = [(64, 270_000), (0, 64)]
    peers.send_copy(node, "5-0", b"record", b"objects", str(path), parts)
    assert (folder / "5-0").read_bytes() == data[64:270_064] + data[:64]
    assert (folder / "5-0.record").read_bytes() == b"record"
    found = peers.recall(node, str(folder / "5-0"), [(270_000, 64), (0, 10), (7, 0)])
    assert found == data[:64] + data[64:74]
    assert peers.recall(node, str(folder / "5-0.objects"), [(0, 7)]) == b"objects"


def test_a_message_does_not_wait_until_the_token_is_confirmed(node: Endpoint) -> None:
    """Nagle's algorithm would hold it back for the 40 ms of a delayed confirmation."""
    with connections.connect(node, 5.0) as line:
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_empty_file_is_not_sent(node: Endpoint, folder: Path, tmp_path: Path) -> None:
    peers.send_copy(node, "5-0", b"record", b"", str(state(tmp_path, 10)), [(0, 10)])
    with pytest.raises(OSError, match="5-0.objects is empty"):
        peers.recall(node, str(folder / "5-0.objects"), [(0, 0)])


def test_a_newer_copy_takes_the_place_of_the_older_one(node: Endpoint, folder: Path, tmp_path: Path) -> None:
    for size in (1000, 1000, 2000, 0):
        path = state(tmp_path, max(size, 1))
        peers.send_copy(node, "5-1", b"%d" % size, b"", str(path), [(0, size)])
        assert (folder / "5-1").read_bytes()[:size] == path.read_bytes()[:size]
        assert (folder / "5-1.record").read_bytes() == b"%d" % size


def test_a_copy_that_is_cut_off_does_not_count(node: Endpoint, folder: Path, tmp_path: Path) -> None:
    peers.send_copy(node, "5-0", b"old", b"", str(state(tmp_path, 1000)), [(0, 1000)])
    with connections.connect(node, 5.0) as line:
        line.sendall(connections.pack(Copy("5-0", 3, 0, 1000)))
        assert connections.read(line) == Proceed()
        line.sendall(b"new" + bytes(999))
    watch.until(lambda: not (folder / "5-0.record").exists())
    peers.send_copy(node, "5-0", b"new", b"", str(state(tmp_path, 1000)), [(0, 1000)])
    assert (folder / "5-0.record").read_bytes() == b"new"


def test_an_old_connection_does_not_write_into_a_newer_copy(folder: Path) -> None:
    """Its thread may still wait for bytes when the rank sends its next state."""
    store = replica_store.ReplicaStore(RUN, SharedMemory(str(folder), LIMIT, True))
    old, new = (store.reserve(Copy("5-0", 3, 0, 1000)) for _ in range(2))
    new.tensors[:] = b"n" * 1000
    new.seal(b"new", b"")
    old.tensors[:] = b"o" * 1000
    with pytest.raises(OSError, match="a newer copy of the rank's state has begun to arrive"):
        old.seal(b"old", b"")
    old.close()
    new.close()
    assert (folder / "5-0").read_bytes() == b"n" * 1000
    assert (folder / "5-0.record").read_bytes() == b"new"
    memory = (folder / "5-0").stat().st_ino
    store.reserve(Copy("5-0", 3, 0, 1000)).close()
    assert (folder / "5-0").stat().st_ino == memory, "memory of an older copy is used again"


def test_a_copy_without_room_is_refused(node: Endpoint, folder: Path, tmp_path: Path) -> None:
    path = state(tmp_path, LIMIT + 1)
    with pytest.raises(OSError, match="a rank needs 1 MiB of shared memory"):
        peers.send_copy(node, "5-0", b"", b"", str(path), [(0, LIMIT + 1)])
    with pytest.raises(
        OSError, match=r"without its tensors has 2000000 bytes, which is already more than this node may keep"
    ):
        peers.send_copy(node, "5-0", bytes(2_000_000), b"", str(path), [(0, 1)])
    assert not list(folder.glob("5-0*"))


@pytest.mark.parametrize("slot", ["../5-0", "5-2", "a-0", "5-0.record", "lock", ""])
def test_other_names_are_refused(node: Endpoint, folder: Path, tmp_path: Path, slot: str) -> None:
    with pytest.raises(OSError, match="is refused: its name does not look like '3-0', or one of its sizes is negative"):
        peers.send_copy(node, slot, b"", b"", str(state(tmp_path, 10)), [(0, 10)])
    assert os.listdir(folder) == [PEERS]


def test_only_files_of_the_run_are_read(node: Endpoint, folder: Path, tmp_path: Path) -> None:
    """Not those of other runs, not the key, not what a path leads to otherwise, and not more than there is."""
    (folder / "5-0").write_bytes(b"tensors")
    (folder / "link").symlink_to("/etc/passwd")
    other = tmp_path / "distributor-0123456789ab-abcd1234"
    other.mkdir(mode=0o700)
    (other / "5-0").write_bytes(b"tensors")
    for path in ("/etc/passwd", str(other / "5-0"), f"{folder}/../{other.name}/5-0", f"{folder}/{PEERS}"):
        with pytest.raises(OSError, match="is not kept by this node"):
            peers.recall(node, path, [(0, 3)])
    for path, offset in ((f"{folder}/link", 0), (f"{folder}/5-0", 5), (f"{folder}/5-0", -1), (f"{folder}/gone", 0)):
        with pytest.raises(OSError, match="symbolic links|are not all within the file that contains|No such file"):
            peers.recall(node, path, [(offset, 3)])


def test_a_folder_that_others_may_read_is_not_of_this_run(node: Endpoint, folder: Path) -> None:
    (folder / "5-0").write_bytes(b"tensors")
    folder.chmod(0o755)
    with pytest.raises(OSError, match="is not kept by this node"):
        peers.recall(node, str(folder / "5-0"), [(0, 3)])


def test_connections_without_the_token_learn_nothing(node: Endpoint, folder: Path, key: PeerKey) -> None:
    host, port, certificate, token = node
    (folder / "5-0").write_bytes(b"tensors")
    with pytest.raises(ConnectionError):
        peers.recall((host, port, certificate, bytes(len(token))), str(folder / "5-0"), [(0, 1)])
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        connections.connect((host, port, make_peer_key().certificate, token), 5.0)
    with socket.create_connection((host, port)) as line:
        line.sendall(b"GET / HTTP/1.0\r\n\r\n")
        line.settimeout(watch.DEADLINE)
        with suppress(ConnectionResetError):
            assert b"200" not in line.recv(1024)


def test_a_long_request_is_refused(node: Endpoint) -> None:
    with connections.connect(node, 5.0) as line, pytest.raises(OSError):
        line.sendall(connections.pack(Recall("x" * (5 << 20), ())))
        connections.read(line)


def test_many_copies_arrive_at_the_same_time(node: Endpoint, folder: Path, tmp_path: Path) -> None:
    path = state(tmp_path, 10_000)
    senders = [
        threading.Thread(target=peers.send_copy, args=(node, f"{rank}-0", b"r", b"o", str(path), [(0, 10_000)]))
        for rank in range(80)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(watch.DEADLINE)
    assert len(list(folder.glob("*.record"))) == 80


def test_a_server_that_cannot_accept_for_a_moment_goes_on(
    key: PeerKey, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, accept = [OSError(errno.EMFILE, "Too many open files")] * 2, socket.socket.accept

    def accepts(listener: socket.socket) -> tuple[socket.socket, object]:
        if refused:
            raise refused.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepts)
    server = replica_store.serve(RUN, key, SharedMemory(str(folder), LIMIT, True), "127.0.0.1")
    at = "127.0.0.1", server._listener.getsockname()[1], key.certificate, key.token
    peers.send_copy(at, "5-0", b"record", b"", str(state(tmp_path, 1000)), [(0, 1000)])
    assert refused == []
    server.close()
    server.join(watch.DEADLINE)
    assert not server.is_alive()


def test_a_server_that_can_start_no_thread_for_a_moment_goes_on(
    node: Endpoint, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, start = [RuntimeError("can't start new thread")] * 70, threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if refused:
            raise refused.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    monkeypatch.setattr(peers, "_ACCEPT_AGAIN", 0.01)
    for _ in range(70):  # more than the server has places for
        with pytest.raises(OSError):
            peers.recall(node, str(folder / "5-0"), [(0, 1)])
    peers.send_copy(node, "5-0", b"record", b"", str(state(tmp_path, 1000)), [(0, 1000)])
    assert (folder / "5-0.record").read_bytes() == b"record"


def test_keys_are_not_shown(key: PeerKey) -> None:
    assert repr(replace(key)) == "PeerKey()"


def test_an_answer_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="no room"):
        peers._expect(Proceed, _line(connections.pack(Refused("no room"))))
    with pytest.raises(OSError, match="unexpected answer from the other node: Proceed"):
        peers._expect(Refused, _line(connections.pack(Proceed())))


def _line(data: bytes) -> socket.socket:
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.close()
    return ours
