"""What the driver does with files that nodes bring."""

from __future__ import annotations

import asyncio
import errno
import hashlib
from pathlib import Path
from typing import Any

import pytest
from jobs import make_job

from distributor.channel import frames
from distributor.errors import StartError
from distributor.machine.storage import Folder
from distributor.output import sink as module
from distributor.output.sink import OutputSink, keep
from distributor.values.files import Brought, Entry
from distributor.values.job import OutputDir
from distributor.values.messages import Delete, Message, Proceed, Received, Refused, Upload


def entry(path: str, content: bytes, **about: Any) -> Entry:
    digest = hashlib.sha256(content).hexdigest()
    return Entry(**{"path": path, "size": len(content), "mode": 0o640, "mtime_ns": 10**18, "digest": digest, **about})


async def answers(output_sink: OutputSink, node: int, request: Upload | Delete, content: bytes = b"") -> list[Message]:
    """What the driver answers to a node that says this and sends these bytes."""
    sent = bytearray()
    reader = asyncio.StreamReader()
    reader.feed_data(content)
    reader.feed_eof()
    writer: Any = type("Writer", (), {"write": staticmethod(sent.extend)})
    try:
        if isinstance(request, Upload):
            await output_sink.receive(request, node, reader, writer)
        else:
            await output_sink.delete(request, node, writer)
    finally:
        back = asyncio.StreamReader()
        back.feed_data(bytes(sent))
        back.feed_eof()
    found = []
    while (answer := await frames.read(back)) is not None:
        found.append(answer)
    return found  # type: ignore[return-value]


def bring(output_sink: OutputSink, node: int, path: str, content: bytes, **about: Any) -> list[Message]:
    return asyncio.run(answers(output_sink, node, Upload(entry(path, content, **about)), content))


def there(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_arrives_with_its_mode_and_time(tmp_path: Path) -> None:
    output_sink = OutputSink(Folder(tmp_path), 100, 5)
    assert bring(output_sink, 0, "a/b.txt", b"content") == [Proceed(), Received()]
    about = (tmp_path / "a/b.txt").stat()
    assert (about.st_mode & 0o777, about.st_mtime_ns) == (0o640, 10**18)
    assert there(tmp_path) == {"a/b.txt": b"content"}
    assert output_sink.warnings == []


def test_a_file_that_becomes_shorter_as_it_is_sent_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"content")
    monkeypatch.setattr("os.fstat", lambda descriptor: (tmp_path / "large").stat())
    (tmp_path / "large").write_bytes(bytes(100))

    async def give() -> None:
        async def drain() -> None:
            pass

        writer: Any = type("Writer", (), {"write": staticmethod(lambda data: None), "drain": staticmethod(drain)})
        await OutputSink(Folder(tmp_path), 100, 5).give(writer)

    with pytest.raises(ConnectionError, match="a has become shorter while it was being sent to a node"):
        asyncio.run(give())


def test_equal_bytes_are_sent_once(tmp_path: Path) -> None:
    output_sink = OutputSink(Folder(tmp_path), 100, 5)
    bring(output_sink, 1, "a", b"same")
    assert bring(output_sink, 0, "a", b"same") == [Received()]
    assert there(tmp_path) == {"a": b"same"}


@pytest.mark.parametrize(
    ("content", "about"),
    [(b"short", {"size": 9}), (b"other", {"digest": "0" * 64})],
)
def test_a_file_that_breaks_off_or_changes_is_not_kept(content: bytes, about: dict[str, Any], tmp_path: Path) -> None:
    output_sink = OutputSink(Folder(tmp_path), 100, 5)
    with pytest.raises(OSError):
        bring(output_sink, 0, "a/b", content, **about)
    assert list(tmp_path.iterdir()) == []
    assert bring(output_sink, 0, "a/b", b"again")[-1] == Received()
    assert output_sink.warnings == []


def test_a_silent_node_is_not_waited_for(tmp_path: Path) -> None:
    output_sink = OutputSink(Folder(tmp_path), 100, 0.05)

    async def wait() -> None:
        writer: Any = type("Writer", (), {"write": staticmethod(lambda data: None)})
        await output_sink.receive(Upload(entry("a", b"x")), 0, asyncio.StreamReader(), writer)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    assert list(tmp_path.iterdir()) == []


def test_the_limit_counts_what_is_kept(tmp_path: Path) -> None:
    output_sink = OutputSink(Folder(tmp_path), 10, 5)
    bring(output_sink, 0, "a", b"123456")
    (refused,) = bring(output_sink, 0, "b", b"12345")
    assert isinstance(refused, Refused) and "would exceed output_limit (10 bytes)" in refused.why
    assert bring(output_sink, 0, "a", b"1234567890")[-1] == Received()  # it replaces the one before
    assert output_sink.warnings == [f"1 new file could not be kept in output_dir (the first: 'b'): {refused.why}"]
    assert asyncio.run(answers(output_sink, 0, Delete("a"))) == [Received()]
    assert bring(output_sink, 0, "b", b"12345")[-1] == Received()
    assert (there(tmp_path), output_sink.warnings) == ({"b": b"12345"}, [])


def test_the_limit_counts_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123456")
    (tmp_path / "b.node-1.part").write_bytes(b"123456")
    with keep(make_job(output_dir=OutputDir(str(tmp_path), 10))) as output_sink:
        assert output_sink is not None
        assert isinstance(bring(output_sink, 0, "c", b"12345")[0], Refused)
        assert bring(output_sink, 0, "a", b"1234567")[-1] == Received()
        assert isinstance(bring(output_sink, 0, "c", b"1234")[0], Refused)
        assert bring(output_sink, 0, "c", b"123")[-1] == Received()


def test_the_limit_counts_a_file_beside_another_of_its_path(tmp_path: Path) -> None:
    output_sink = OutputSink(Folder(tmp_path), 10, 5)
    bring(output_sink, 0, "a", b"123456")
    (refused,) = bring(output_sink, 1, "a", b"654321")
    assert isinstance(refused, Refused)
    assert there(tmp_path) == {"a": b"123456"}


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output_sink = OutputSink(Folder(tmp_path), 100, 5)

    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module._Arriving, "write", full)
    assert bring(output_sink, 0, "a", b"x") == [Proceed(), Refused("No space left on device")]
    assert output_sink.warnings == [
        "1 new file could not be kept in output_dir (the first: 'a'): No space left on device"
    ]


def test_files_that_come_through_spark_are_kept_by_node(tmp_path: Path) -> None:
    output_sink = OutputSink(Folder(tmp_path), 12, 5)
    brought = [Brought(node, entry("a", content), [content]) for node, content in ((1, b"one"), (0, b"zero"))]
    output_sink.settle([*brought, Brought(2, entry("b", b"too much"), [b"too much"])])
    assert there(tmp_path) == {"a": b"zero", "a.node-1": b"one"}
    assert [warning.partition(":")[0] for warning in output_sink.warnings] == [
        "nodes wrote different bytes to 'a'",
        "1 new file could not be kept in output_dir (the first",
    ]


def test_refuses_bytes_that_changed_on_the_way_through_spark(tmp_path: Path) -> None:
    output_sink = OutputSink(Folder(tmp_path), 100, 5)
    output_sink.settle([Brought(0, entry("a", b"announced"), [b"something"])])
    assert there(tmp_path) == {}
    assert "the SHA-256 of a differs from the one that its node announced" in output_sink.warnings[0]


def test_a_full_disk_keeps_no_part_of_what_comes_through_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output_sink = OutputSink(Folder(tmp_path), 100, 5)

    class Full(module._Arriving):
        def __init__(self, path: Path, entry: Entry) -> None:
            super().__init__(path, entry)
            self._file = open("/dev/full", "wb", buffering=0)

    monkeypatch.setattr(module, "_Arriving", Full)
    output_sink.settle([Brought(0, entry("a/b", b"content"), [b"content"])])
    assert list(tmp_path.iterdir()) == []
    assert output_sink.warnings == [
        "1 new file could not be kept in output_dir (the first: 'a/b'): No space left on device"
    ]


def test_an_upload_beyond_the_limit_does_not_stay_at_the_url(tmp_path: Path) -> None:
    uploaded = {"a": "a.node-0.part.1", "b": "b.node-0.part.2"}
    for path, name in uploaded.items():
        (tmp_path / name).write_text(path * 6)
    with keep(make_job(output_dir=OutputDir(tmp_path.as_uri(), 10))) as output_sink:
        assert output_sink is not None
        output_sink.settle([Brought(0, entry(path, path.encode() * 6), [], name) for path, name in uploaded.items()])
    assert there(tmp_path) == {"a": b"aaaaaa"}
    assert "(the first: 'b'): with this file, the files in output_dir would exceed" in output_sink.warnings[0]


def test_a_url_that_fails_as_the_run_starts() -> None:
    job = make_job(output_dir=OutputDir("nowhere://run", 1))
    with pytest.raises(StartError, match="output_dir 'nowhere://run' cannot be used: Protocol not known"), keep(job):
        pass


def test_a_change_that_fails_leaves_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"123456")
    with keep(make_job(output_dir=OutputDir(str(tmp_path), 10))) as output_sink:
        assert output_sink is not None
        with monkeypatch.context() as patch:
            patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
            assert bring(output_sink, 0, "a", b"12345678") == [Proceed(), Refused("Permission denied")]
        assert there(tmp_path) == {"a": b"123456"}
        assert bring(output_sink, 0, "b", b"1234")[-1] == Received()
        assert isinstance(bring(output_sink, 0, "c", b"1")[0], Refused)


def test_each_job_has_an_event_loop_of_its_own(tmp_path: Path) -> None:
    """Nodes bring files at the same time, in one job and in the next."""
    output_sink = OutputSink(Folder(tmp_path), 1 << 20, 5.0)

    async def bring_all(job: int) -> list[list[Message]]:
        content = b"x" * 1000
        requests = [Upload(entry(f"{job}-{number}", content)) for number in range(8)]
        return await asyncio.gather(*(answers(output_sink, 0, each, content) for each in requests))

    for job in range(2):
        output_sink.begin()
        found = asyncio.run(bring_all(job))
        assert all(isinstance(each[-1], Received) for each in found)
