"""What a place holds, after a kill at each of its operations and on stores that promise little."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stores

from distributor.checkpoint import catalog
from distributor.checkpoint.catalog import Catalog, Draft
from distributor.checkpoint.records import MANIFEST, Shard, folder_name
from distributor.machine import storage
from distributor.machine.storage import Folder, Storage, open_storage
from distributor.values.checkpoints import Checkpoints

KEEP = Checkpoints("x", keep=2)


class Killed(BaseException):
    """The process is gone: no handler sees it."""


@pytest.fixture(autouse=True)
def _empty_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "PAUSES", (0.0,) * 5)
    stores.FILES.clear()
    yield
    stores.FILES.clear()
    stores.BEFORE.clear()


@pytest.fixture(params=["folder", "forgetful"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Opens the place anew, as each process does."""
    where = str(tmp_path / "runs") if request.param == "folder" else "forgetful://bucket/run"
    return lambda: open_storage(where)


def save(place: Storage, step: int, origin: str = "3f-0", content: bytes = b"weights") -> None:
    """Saves one shard, and commits it, with a catalog that knows nothing yet."""
    folder = folder_name(step, origin, step)
    shard = Shard("model.pt", len(content), zlib.crc32(content))
    place.write(f"{folder}/model.pt", content)
    Catalog(place, KEEP).commit(Draft(folder, step, 1, origin, (shard,), {}))


def steps(place: Storage) -> list[int]:
    found = Catalog(place, KEEP)
    return [each.step for each in found.committed() if found.problem(each) is None]


def test_checkpoints_are_found_again_and_old_ones_go(opened: Callable[[], Storage]) -> None:
    assert Catalog(opened(), KEEP).latest({}) is None
    for step in (1, 2, 3, 4):
        save(opened(), step)
    assert steps(opened()) == [4, 3]
    assert opened().size(f"{folder_name(1, '3f-0', 1)}/model.pt") is None
    assert opened().size(f"{folder_name(2, '3f-0', 2)}/{MANIFEST}") is None


def test_the_last_commit_counts_and_not_the_highest_step(opened: Callable[[], Storage]) -> None:
    save(opened(), 1000)
    save(opened(), 10, origin="aa-0")
    found = Catalog(opened(), KEEP).latest({})
    assert found is not None and found.step == 10


def test_a_checkpoint_that_lacks_a_shard_is_not_offered(opened: Callable[[], Storage]) -> None:
    save(opened(), 1)
    save(opened(), 2)
    opened().write(f"{folder_name(2, '3f-0', 2)}/model.pt", b"weigh")
    assert steps(opened()) == [1]
    opened().remove(f"{folder_name(2, '3f-0', 2)}/model.pt")
    assert steps(opened()) == [1]


def kill_at(place: Storage, number: int, torn: bool) -> Storage:
    """A place whose so-manyth change kills the process, before it happens or, for a write, in the middle of it."""
    count = 0
    root = place.root

    class Dying:
        def __getattr__(self, name: str) -> object:
            method = getattr(place, name)
            if name not in ("write", "remove", "remove_folder"):
                return method

            def call(*arguments: object) -> object:
                nonlocal count
                count += 1
                if count == number:
                    if torn and name == "write":
                        tear(str(arguments[0]), bytes(arguments[1]))  # type: ignore[call-overload]
                    raise Killed
                return method(*arguments)

            return call

    def tear(name: str, data: bytes) -> None:
        """Writes half of a file under its name, as a store without atomic writes may."""
        if root is None:
            place.write(name, data[: len(data) // 2])
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data[: len(data) // 2])

    return Dying()  # type: ignore[return-value]


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_any_change_leaves_a_committed_step(opened: Callable[[], Storage], torn: bool) -> None:
    """After each kill, a new process finds a whole checkpoint, and goes on to commit more."""
    save(opened(), 1)
    save(opened(), 2)
    step, number = 2, 0
    while True:
        number += 1
        step += 1
        before = steps(opened())
        try:
            save(kill_at(opened(), number, torn), step)
        except Killed:
            after = steps(opened())
            assert after and after[0] in (before[0], step)
            save(opened(), step + 1000)  # another process goes on
            assert steps(opened())[0] == step + 1000
            continue
        assert steps(opened())[0] == step
        assert number > 5  # the sweep has met each change: shard, manifest, index, and what is removed
        return


def test_a_store_that_fails_every_third_request_is_asked_again() -> None:
    place = open_storage("forgetful://bucket/run")
    stores.BEFORE.append(stores.fail_every(3))
    for step in range(1, 6):
        save(place, step)
    assert steps(place) == [5, 4]


def test_a_store_that_stays_down_leaves_earlier_checkpoints() -> None:
    place = open_storage("forgetful://bucket/run")
    save(place, 1)
    stores.BEFORE.append(stores.fail_every(1))
    with pytest.raises(ConnectionError, match="503 Slow Down"):
        save(place, 2)
    stores.BEFORE.clear()
    assert steps(place) == [1]


def test_what_nobody_writes_to_any_more_is_removed(tmp_path: Path) -> None:
    """Torn folders of this run's earlier attempts at once, others after an hour, and nothing else."""
    place = Folder(tmp_path)
    long_ago = time.time() - catalog._ABANDONED - 60
    names = {
        "earlier attempt": folder_name(1, "3f-0", 1),
        "later attempt": folder_name(1, "3f-2", 1),
        "other run, now": folder_name(1, "aa-0", 1),
        "other run, long ago": folder_name(1, "bb-0", 1),
        "a user's": "step-1",
    }
    for about, name in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_bytes(b"torn")
        if "now" not in about:
            for path in (tmp_path / name / "model.pt", tmp_path / name):
                os.utime(path, (long_ago, long_ago))
    other = folder_name(5, "cc-0", 5)
    this = Catalog(place, KEEP)
    this.committed()
    save(place, 5, origin="cc-0")  # committed by another run meanwhile
    for path in (tmp_path / other).iterdir():
        os.utime(path, (long_ago, long_ago))
    os.utime(tmp_path / other, (long_ago, long_ago))
    place.write(f"{folder_name(2, '3f-1', 1)}/model.pt", b"x")
    this.commit(Draft(folder_name(2, "3f-1", 1), 2, 1, "3f-1", (), {}))
    left = {about for about, name in names.items() if (tmp_path / name).exists()}
    assert left == {"other run, now", "a user's"}
    assert (tmp_path / other).exists()


def test_a_run_that_holds_a_name_removes_what_other_runs_have_not_committed(tmp_path: Path) -> None:
    place = open_storage(str(tmp_path))
    torn, own, whole = folder_name(3, "aa-0", 3), folder_name(3, "3f-0", 3), folder_name(1, "aa-0", 1)
    save(place, 1, origin="aa-0")
    for name in (torn, own):
        place.write(f"{name}/model.pt", b"torn")
    Catalog(place, KEEP, sole=True).commit(Draft(folder_name(2, "3f-0", 2), 2, 1, "3f-0", (), {}))
    assert [name for name in (torn, own, whole) if (tmp_path / name).exists()] == [own, whole]


def test_a_checkpoint_that_cannot_be_committed_is_removed(opened: Callable[[], Storage]) -> None:
    place = opened()
    place.write("step-1-3f-0-1/model.pt", b"x")
    Catalog(place, KEEP).discard("step-1-3f-0-1")
    assert place.size("step-1-3f-0-1/model.pt") is None
