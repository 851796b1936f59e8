"""``checkpoint_folder`` in two ranks, which are threads: how they wait for each other, and what they refuse."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributor.checkpoint import exchange as exchanges, folder as folders, loading, publishing, saving
from distributor.checkpoint.catalog import Catalog, Draft
from distributor.checkpoint.context import Session
from distributor.checkpoint.exchange import Exchange
from distributor.checkpoint.folder import checkpoint_folder
from distributor.errors import ConfigurationError
from distributor.machine.storage import Folder
from distributor.values.checkpoints import Checkpoints, Settings

torch = pytest.importorskip("torch")

LIMIT = 60


class Ranks:
    """Two ranks, each a thread with a session of its own."""

    def __init__(self, place: Path) -> None:
        store = torch.distributed.HashStore()
        self.sessions = [Session(Settings(Checkpoints(str(place)), None, {}, True)) for _ in range(2)]
        for rank, session in enumerate(self.sessions):
            session._exchange = Exchange(store, rank, 2), "3f-0"
        self._pool = ThreadPoolExecutor(2)
        self._own = threading.local()

    def current(self, _: str, **__: Any) -> Session:
        session: Session = self._own.session
        return session

    def run(self, *functions: Callable[[], Any]) -> list[Future[Any]]:
        """Runs one function in each rank, which then ends."""

        def call(session: Session, function: Callable[[], Any]) -> Any:
            self._own.session = session
            try:
                return function()
            finally:
                session.exchange._end(os.getpid())

        return [
            self._pool.submit(call, session, function)
            for session, function in zip(self.sessions, functions, strict=True)
        ]

    @property
    def steps(self) -> list[int]:
        """The steps of the whole checkpoints that a new process finds, the newest first."""
        catalog = Session(self.sessions[0].settings).catalog
        return [each.step for each in catalog.committed() if catalog.problem(each) is None]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    found = Ranks(tmp_path / "runs")
    monkeypatch.setattr(folders, "current", found.current)
    return found


def save(write: Callable[[Path], Any], step: int = 1) -> Callable[[], None]:
    def function() -> None:
        with checkpoint_folder(step) as folder:
            write(folder)

    return function


def nothing(_: Path) -> None:
    pass


class Watched:
    """A store that tells when a rank has asked it for more than one look at another rank's value takes."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._left = 5
        self.waiting = False
        self.asked_often = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        if self.waiting:
            self._left -= 1
            if not self._left:
                self.asked_often.set()
        return bool(self._store.check(keys))


def test_a_rank_that_writes_for_long_is_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 stays in the block until rank 1, which has left it, has waited for longer than the limits."""
    store, in_block = Watched(ranks.sessions[1].exchange._store), threading.Barrier(2)
    ranks.sessions[1]._exchange = Exchange(store, 1, 2), "3f-0"

    def write(folder: Path) -> None:
        in_block.wait(LIMIT)
        assert store.asked_often.wait(LIMIT)
        (folder / "model.pt").write_text("weights")

    def leave(_: Path) -> None:
        in_block.wait(LIMIT)
        monkeypatch.setattr(exchanges, "TELL_PATIENTLY_AFTER", -1.0)
        monkeypatch.setattr(exchanges, "GIVE_UP_AFTER", 0.0)
        store.waiting = True

    def rank_1() -> None:
        try:
            save(leave)()
        finally:
            store.asked_often.set()  # rank 0 need not wait if this rank has given up

    for future in reversed(ranks.run(save(write), rank_1)):
        future.result(LIMIT)
    assert ranks.steps == [1]
    assert "checkpoint_folder(step=1) waits for rank 0: it may still be writing or reading, or waiting" in caplog.text


def test_saves_that_fail_alike_warn_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit, failing = Catalog.commit, {2: "read-only", 3: "read-only", 5: "read-only", 6: "full"}

    def commit_some(catalog: Catalog, draft: Draft) -> Any:
        if draft.step in failing:
            raise OSError(f"{draft.folder}: {failing[draft.step]}, with room for {draft.step} MiB")
        return commit(catalog, draft)

    def save_all() -> None:
        for step in range(1, 7):
            save(nothing, step)()

    monkeypatch.setattr(Catalog, "commit", commit_some)
    for future in ranks.run(save_all, save_all):
        future.result(LIMIT)
    warned = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in warned] == [f"checkpoint_folder(step={step})" for step in (2, 5, 6)]


def test_ranks_are_told_of_a_commit_and_not_of_each_file(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks' files, sent to each rank, are many."""
    told: list[publishing.SaveOutcome] = []
    monkeypatch.setattr(publishing, "warn_unless_saved", lambda _, __, outcome: told.append(outcome))
    for future in ranks.run(*[save(lambda folder: (folder / "model.pt").touch())] * 2):
        future.result(LIMIT)
    assert [each.manifest is not None and each.manifest.shards for each in told] == [(), ()]
    manifest = Session(ranks.sessions[0].settings).catalog.latest({})
    assert manifest is not None and len(manifest.shards) == 1


def test_nobody_waits_for_a_rank_whose_call_was_wrong(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call is in step."""
    monkeypatch.setattr(saving, "current", ranks.current)
    may_end = threading.Barrier(2)

    def call(folder_step: Any, state: Any) -> tuple[str, str]:
        told = []
        for wrong in (save(nothing, folder_step), lambda: saving.save_checkpoint(state, 2, wait=True)):
            with pytest.raises((ConfigurationError, RuntimeError)) as raised:
                wrong()
            told.append(str(raised.value))
        save(nothing, 3)()
        may_end.wait(LIMIT)
        return told[0], told[1]

    one, other = ranks.run(lambda: call(1, {"value": 1}), lambda: call("one", ["value"]))
    step, state = "step must be a whole number of at least 0, not 'one'", "state must be a dict such as "
    for found, own in zip(one.result(LIMIT), other.result(LIMIT), strict=True):
        assert own in found
        assert found.endswith("; the exception raised there says why")
    assert [step in one.result()[0], state in one.result()[1]] == [True, True]
    assert "checkpoint_folder(step='one'): rank 1 failed in the call (" in one.result()[0]
    assert ranks.steps == [3]


def test_a_rank_that_never_enters_the_block_is_named_before_a_write(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "GIVE_UP_AFTER", 0.1)
    entered, may_end = list[Path](), threading.Event()

    def enter() -> None:
        try:
            save(entered.append)()
        finally:
            may_end.set()

    _, waiting = ranks.run(lambda: may_end.wait(LIMIT), enter)
    with pytest.raises(
        ConfigurationError, match=r"every rank must call checkpoint_folder\(step=1\), but rank 0 did not call it within"
    ):
        waiting.result(LIMIT)
    assert entered == []


def test_nobody_waits_for_a_rank_without_a_folder(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ranks.sessions[1].storage = Folder(tmp_path / "file")
    ranks.sessions[1]._staging = tmp_path / "file"
    first, second = ranks.run(save(nothing), save(nothing))
    with pytest.raises(NotADirectoryError):
        second.result(LIMIT)
    with pytest.raises(RuntimeError, match=r"checkpoint_folder\(step=1\): rank 1 failed in the with block"):
        first.result(LIMIT)


#: Where a rank can be interrupted: before (``True``) or after it exchanges something, with the end of the key.
INSTANTS = [
    (method, stage, before)
    for stage in ("1", "2", "done")
    for method in ("gather", "share")
    for before in (True, False)
]


@pytest.mark.parametrize(("method", "stage", "before"), INSTANTS)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_is_interrupted_and_goes_on_holds_up_nobody(
    failing: int, method: str, stage: str, before: bool, ranks: Ranks
) -> None:
    """Wherever this happens in the with statement. The next checkpoint is committed as usual."""
    exchange, others_know = ranks.sessions[failing].exchange, threading.Event()
    real = getattr(exchange, method)

    def interrupt(key: str, *rest: Any, **options: Any) -> Any:
        answer = None if before else real(key, *rest, **options)
        if key == f"1/{stage}":
            raise KeyboardInterrupt
        return real(key, *rest, **options) if before else answer

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            save(nothing)()
        assert others_know.wait(LIMIT)
        save(nothing, 2)()

    def other() -> None:
        last = ("share", "done", False) if failing == 0 else ("gather", "done", False)
        if INSTANTS.index((method, stage, before)) >= INSTANTS.index(last):  # the interrupted rank has done its part
            save(nothing)()
        else:
            with pytest.raises(RuntimeError, match=f"rank {failing} failed in the with block") as raised:
                save(nothing)()
            assert raised.type is RuntimeError
        others_know.set()
        save(nothing, 2)()

    setattr(exchange, method, interrupt)
    functions = [interrupted, other]
    for future in ranks.run(*(functions if failing == 0 else reversed(functions))):
        future.result(LIMIT)
    assert ranks.steps[0] == 2


def test_a_rank_that_gives_up_before_the_block_holds_up_nobody(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 catches the error of a wait that is too long, although rank 0 has just come, and goes on."""
    gave_up, others_know = threading.Event(), threading.Event()

    def give_up() -> None:
        with monkeypatch.context() as limits:
            limits.setattr(exchanges, "GIVE_UP_AFTER", 0.0)
            with pytest.raises(ConfigurationError, match="rank 0 did not call it within"):
                save(nothing)()
        gave_up.set()
        assert others_know.wait(LIMIT)

    def come() -> None:
        assert gave_up.wait(LIMIT)
        with pytest.raises(RuntimeError, match="rank 1 failed in the with block") as raised:
            save(nothing)()
        assert raised.type is RuntimeError
        others_know.set()

    for future in ranks.run(come, give_up):
        future.result(LIMIT)


def test_a_save_in_the_block_is_committed_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by a thread at the same moment."""
    session = Session(Settings(Checkpoints(str(tmp_path)), None, {}, True))
    session._exchange = Exchange(None, 0, 1), "3f-0"
    for module in (folders, saving):
        monkeypatch.setattr(module, "current", lambda *_: session)
    monkeypatch.setattr(session, "save_later", lambda save: setattr(session, "_saving", SimpleNamespace(join=save)))
    with checkpoint_folder(2):
        saving.save_checkpoint({"value": 1}, 1)
    assert [each.step for each in session.catalog.committed()] == [2, 1]


def test_linked_folders_are_committed_with_their_files(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "model" / "part").mkdir(parents=True)
    (tmp_path / "model" / "part" / "0.pt").write_text("weights")

    def link(folder: Path) -> None:
        (folder / "model").symlink_to(tmp_path / "model")

    for future in ranks.run(save(nothing), save(link)):
        future.result(LIMIT)
    manifest = Session(ranks.sessions[0].settings).catalog.latest({})
    assert manifest is not None and [shard.name for shard in manifest.shards] == ["model/part/0.pt"]
    assert (tmp_path / "runs" / manifest.folder / "model/part/0.pt").read_text() == "weights"
    assert (tmp_path / "model" / "part" / "0.pt").read_text() == "weights"


@pytest.mark.parametrize("failing", [0, 1])
def test_what_cannot_be_part_of_a_checkpoint_is_an_error_in_the_block(failing: int, ranks: Ranks) -> None:
    def link(folder: Path) -> None:
        (folder / "model").symlink_to(folder / "gone")

    futures = ranks.run(*(save(link if rank == failing else nothing) for rank in range(2)))
    with pytest.raises(ConfigurationError, match="checkpoint_folder: 'model' cannot be saved, since there is no file"):
        futures[failing].result(LIMIT)
    with pytest.raises(RuntimeError, match=f"rank {failing} failed in the with block"):
        futures[1 - failing].result(LIMIT)
    assert ranks.steps == []


@pytest.mark.parametrize("names", [["model.pt"], ["model.pt", ".metadata"]])
def test_a_checkpoint_of_users_files_is_not_loaded(
    names: list[str], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if torch's distributed checkpoints wrote them, which have the same file of metadata."""
    monkeypatch.setattr(loading, "current", ranks.current)

    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_text("weights")

    def load() -> None:
        save(write)()
        loading.load_checkpoint({"epoch": 1})

    told = r"load_checkpoint: the checkpoint of step 1 was written by checkpoint_folder: find its files with latest_ch"
    for future in ranks.run(load, load):
        with pytest.raises(ConfigurationError, match=told):
            future.result(LIMIT)


def test_files_of_a_save_that_failed_are_removed_before_the_next_commit(ranks: Ranks) -> None:
    """Unless it was committed before it failed."""
    session = ranks.sessions[0]

    def write(folder: Path) -> None:
        (folder / "model.pt").write_text("weights")

    def fail(_: Path) -> None:
        raise ValueError("no memory")

    def rank_0() -> list[str]:
        save(write)()
        with pytest.raises(RuntimeError, match=r"rank 1 failed in the with block \(ValueError: no memory\); the exc"):
            save(write)()
        unfinished = list(session.unfinished)
        for folder in unfinished:
            session.storage.write(f"{folder}/model.pt", b"weights")
        session.unfinished.append(session.catalog.committed()[0].folder)
        save(write)()
        return unfinished

    def rank_1() -> None:
        save(nothing)()
        with pytest.raises(ValueError, match="no memory"):
            save(fail)()
        save(nothing)()

    first, second = ranks.run(rank_0, rank_1)
    second.result(LIMIT)
    (unfinished,) = first.result(LIMIT)
    assert ranks.steps == [1, 1]
    assert unfinished not in session.storage.folders()
