"""What a rank says when it cannot save or load as usual."""

from __future__ import annotations

import os
import threading
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import stores
import torch

from distributor.checkpoint import folder as folders, loading, pickles, plans, saving
from distributor.checkpoint.context import Session
from distributor.checkpoint.exchange import Exchange
from distributor.checkpoint.memory.states import Seat
from distributor.checkpoint.publishing import Save
from distributor.checkpoint.records import Manifest, Shard
from distributor.values import sealed
from distributor.values.checkpoints import Checkpoints, Settings
from distributor.values.lease_record import FILES, FencingToken, Holder, LeaseRecord


def test_a_folder_that_cannot_be_read_is_no_error_if_memory_has_a_state(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    session = Session(Settings(Checkpoints(str(folder)), None, {}, True))
    if folder.exists():
        folder.rmdir()
    folder.write_text("a file in its place")
    passed: dict[str, OSError] = {}
    assert loading._committed(session, passed, has_state=True) is None
    assert str(passed[str(folder)]).startswith("[Errno 20] Not a directory")
    with pytest.raises(NotADirectoryError):
        loading._committed(session, {}, has_state=False)


def test_a_tensor_that_was_not_copied_cannot_be_written(tmp_path: Path) -> None:
    """The plan gives this rank a tensor that another rank wrote when the copies were made."""
    plan: Any = SimpleNamespace(items=[SimpleNamespace(index=SimpleNamespace(fqn=name)) for name in ("mine", "new")])
    save = Save("save_checkpoint(step=2)", 2, "key", "step-2-3f-0-2")
    task = saving._Task(None, save, plan, {"mine": torch.ones(1)}, b"", frozenset())  # type: ignore[arg-type]
    told = "this rank must now write the tensor 'new', which it has not copied; the next save will be complete"
    with pytest.raises(OSError, match=told):
        task._write(plan, tmp_path / "staging")


def test_a_download_replaces_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file has the name of another, with an end that marks what has not arrived completely."""
    monkeypatch.setattr(stores, "FILES", {})
    session = Session(Settings(Checkpoints("forgetful://bucket/run"), str(tmp_path), {}, True))
    folder, names = "step-1-3f-0-1", ("a.part", "a", "sub/a.part", "sub/a", "/".join(["s" * 100] * 3))
    for name in names:
        session.storage.write(f"{folder}/{name}", name.encode())
    shards = tuple(Shard(name, len(name), zlib.crc32(name.encode())) for name in names)
    found = loading._here(session, Manifest(folder, 1, 1, 0.0, 1, "3f-0", shards))
    there = {str(path.relative_to(found.path)): path.read_text() for path in found.path.rglob("*") if path.is_file()}
    assert there == {name: name for name in names}


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("kind", ["store", "file"])
def test_a_name_that_is_not_utf_8_comes_back_from_a_url(
    kind: str, damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file with such a name is an error like any other."""
    monkeypatch.setattr(stores, "FILES", {})
    place = "forgetful://bucket/run" if kind == "store" else f"file://{tmp_path}/runs"
    session, name = Session(Settings(Checkpoints(place), str(tmp_path), {}, True)), os.fsdecode(b"caf\xe9.pt")
    session._exchange = Exchange(None, 0, 1), "3f-0"
    monkeypatch.setattr(folders, "current", lambda _: session)
    monkeypatch.setattr(loading, "current", lambda *_, **__: session)
    with folders.checkpoint_folder(1) as folder:
        (folder / name).write_text("weights")
    if damaged:
        session.storage.write(f"step-1-3f-0-1/{name}", b"WEIGHTS")
        assert loading.load_checkpoint({"value": 0}) is None
        assert r"passes over step-1-3f-0-1 (caf\udce9.pt has other bytes than were saved)" in caplog.text
    else:
        found = loading.latest_checkpoint()
        assert found is not None and (found.path / name).read_text() == "weights"


def test_a_save_whose_thread_cannot_be_started_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(Settings(Checkpoints(str(tmp_path)), None, {}, True))

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            session.save_later(int)
    session.finish()
    saved = threading.Event()
    session.save_later(saved.set)
    session.finish()
    assert saved.is_set()


@pytest.mark.parametrize(
    ("held", "named", "refused"),
    [
        (None, False, None),  # the driver sees another folder than the ranks
        ("a0", False, None),
        ("released", False, None),
        ("z9", False, "run z9 of process 1 on host has taken the folder for checkpoints of this run"),
        (None, True, "has no record of this run's name"),
        ("z9", True, "run z9 of process 1 on host has taken the name of this run"),
        ("released", True, "run z9 has taken the name of this run"),
    ],
)
def test_commits_only_while_the_run_has_its_lease(
    held: str | None, named: bool, refused: str | None, tmp_path: Path
) -> None:
    fence = FencingToken(str(tmp_path), "a0", is_named=named)
    session = Session(Settings(Checkpoints(str(tmp_path)), None, {}, True, fence=fence))
    if held is not None:
        run = "z9" if held == "released" else held
        holder = None if held == "released" else Holder(run, "host", "machine", 1, "1")
        session.storage.write(FILES[1], sealed.seal(LeaseRecord(1, 1, "", "", {}, False, run, holder)))
    with pytest.raises(OSError, match=refused) if refused is not None else nullcontext():
        session.check_fence()


def test_a_plan_that_may_not_have_arrived_is_sent_again() -> None:
    planner = plans.Planner(Exchange(None, 0, 1), Seat(""))
    tensors = {"model.weight": torch.ones(2)}
    planner.settle("1", tensors, {}, "save_checkpoint(step=1)")
    assert planner.is_same(tensors)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    planner._exchange.share = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        planner.settle("2", tensors, {}, "save_checkpoint(step=2)")
    assert not planner.is_same(tensors)


def test_equal_plans_of_many_ranks_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = plans.Planner(Exchange(None, 0, 3))
    both, other = ({name: torch.ones(2) for name in names} for names in (("a", "b"), ("b", "c")))
    read = Mock(wraps=pickles.loads)
    monkeypatch.setattr(plans, "pickles", Mock(loads=read, dumps=pickles.dumps))
    finals = planner._plan([(plans._local(dict(each)), {}, ("", 0, "", "", 0)) for each in (both, both, other)])
    assert read.call_count == 2
    written = [[item.index.fqn for item in pickles.loads(each)[0].items] for each in finals]
    assert written == [["a", "b"], [], ["c"]]
