"""Files of a place that are damaged or cannot be read: each costs its own checkpoint, and the user is told."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stores

from distributor.checkpoint import loading
from distributor.checkpoint.catalog import Catalog, Draft
from distributor.checkpoint.context import Session
from distributor.checkpoint.exchange import Exchange
from distributor.checkpoint.memory.states import InMemory
from distributor.checkpoint.records import INDEX, MANIFEST, Index, Shard, folder_name
from distributor.machine import storage
from distributor.machine.storage import Storage, open_storage
from distributor.values import sealed
from distributor.values.checkpoints import Checkpoints, Settings

BEST = Checkpoints("x", keep=2, best=("loss", "min"))

EIO = OSError(errno.EIO, os.strerror(errno.EIO))
ESTALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
EACCES = PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def name(step: int) -> str:
    return folder_name(step, "3f-0", step)


def save(catalog: Catalog, place: Storage, step: int, **metrics: float) -> None:
    content = b"weights of step %d" % step
    shard = Shard("model.pt", len(content), zlib.crc32(content))
    place.write(f"{name(step)}/model.pt", content)
    catalog.commit(Draft(name(step), step, 1, "3f-0", (shard,), metrics))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "PAUSES", (0.0,) * 5)
    monkeypatch.setattr(stores, "FILES", {})
    yield
    stores.BEFORE.clear()


@pytest.fixture
def place(tmp_path: Path) -> Storage:
    """Three checkpoints."""
    made = open_storage(str(tmp_path))
    catalog = Catalog(made, Checkpoints("x"))
    for step in (1, 2, 3):
        save(catalog, made, step)
    return made


@pytest.fixture
def latest(place: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int | None]:
    """Returns the step of ``latest_checkpoint`` in a process of its own, whose place may have faults."""

    def find(call: str = "latest_checkpoint", /, checkpoints: Checkpoints | None = None, **faults: Any) -> int | None:
        session = open_session(replace(checkpoints or Checkpoints("x"), dir=str(tmp_path)), faults.pop("faults", {}))
        monkeypatch.setattr(loading, "current", lambda *_, **__: session)
        found = getattr(loading, call)()
        return None if found is None else found.step

    return find


def open_session(checkpoints: Checkpoints, faults: dict[str, OSError]) -> Session:
    session = Session(Settings(checkpoints, None, {}, True))
    session._exchange = Exchange(None, 0, 1), "3f-1"
    session.storage = stores.Faulty(session.storage, faults)  # type: ignore[assignment]
    session.catalog = Catalog(session.storage, checkpoints)
    return session


@pytest.mark.parametrize("error", [EIO, ESTALE, EACCES])
@pytest.mark.parametrize(
    ("file", "step"),
    [
        (f"{name(1)}/{MANIFEST}", 3),
        (f"{name(3)}/{MANIFEST}", 2),
        (f"{name(3)}/model.pt", 2),
        (INDEX[0], 3),
        (INDEX[1], 3),
    ],
)
def test_a_file_that_cannot_be_read_costs_its_own_checkpoint(
    latest: Any, file: str, step: int, error: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    assert latest(faults={file: error}) == step
    folder, _, shard = file.rpartition("/")
    told = f"({shard} cannot be read: {error})"
    assert f"latest_checkpoint returns {name(step)} and passes over {folder or file} {told}" in caplog.text
    assert len(caplog.records) == 1


def seal(told: Any) -> bytes:
    line = json.dumps(told).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def fields(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data.partition(b"\n")[0])
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[:-9], "is incomplete or damaged"),
        (lambda data: b"", "is empty"),
        (lambda data: b"{}", "is incomplete or damaged"),
        (lambda data: seal([]), "holds something else"),
        (lambda data: seal(3), "holds something else"),
        (lambda data: seal({**fields(data), "number": "3"}), "holds something else"),
        (lambda data: seal({**fields(data), "shards": [{"name": 1, "size": 2, "digest": ""}]}), "holds something else"),
        (lambda data: seal({**fields(data), "shards": 5}), "holds something else"),
        (lambda data: seal({**fields(data), "metrics": {"loss": "low"}}), "holds something else"),
        (lambda data: seal({**fields(data), "format": 2}), "was written by a newer version of distributor"),
        (lambda data: seal({**fields(data), "folder": name(2)}), f"is that of {name(2)}"),
    ],
)
def test_a_manifest_that_is_none_is_said_to_be_none(
    latest: Any, tmp_path: Path, change: Callable[[bytes], bytes], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name(3) / MANIFEST
    path.write_bytes(change(path.read_bytes()))
    assert latest() == 2
    assert f"latest_checkpoint returns {name(2)} and passes over {name(3)} ({MANIFEST} {told}" in caplog.text


def test_a_folder_in_the_place_of_a_file(latest: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in (tmp_path / name(3) / MANIFEST, tmp_path / name(2) / "model.pt", tmp_path / INDEX[0]):
        path.unlink()
        path.mkdir()
    assert latest() == 1
    for folder, file in ((name(3), MANIFEST), (name(2), "model.pt"), (INDEX[0], INDEX[0])):
        assert f"{folder} ({file} cannot be read: [Errno 21] Is a directory" in caplog.text


def test_a_file_in_the_place_of_a_folder(latest: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(tmp_path / name(3))
    (tmp_path / name(3)).touch()
    assert latest() == 2
    assert f"latest_checkpoint returns {name(2)} and passes over {name(3)} ({MANIFEST} is missing)" in caplog.text


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (MANIFEST, "manifest.json is missing"),
        ("model.pt", "model.pt is missing"),
        ("model.pt", "model.pt has 5 bytes instead of 17"),
    ],
)
def test_a_missing_or_truncated_file_is_never_silent(
    latest: Any, tmp_path: Path, file: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name(3) / file
    path.write_bytes(b"weigh") if "bytes" in told else path.unlink()
    assert latest() == 2
    assert f"latest_checkpoint returns {name(2)} and passes over {name(3)} ({told})" in caplog.text


def test_an_older_checkpoint_that_was_removed_is_not_spoken_of(
    place: Storage, latest: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two were superfluous, and the user has removed another one, which the index still names."""
    save(Catalog(place, Checkpoints("x", keep=2)), place, 4)
    shutil.rmtree(tmp_path / name(3))
    assert latest() == 4
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ({"": EIO}, "Input/output error"),
        ({MANIFEST: EIO}, f"no checkpoint in .* can be loaded: {name(3)} .*manifest.json cannot be read: .*{name(1)} "),
        ({MANIFEST: EIO, ".json": EIO}, "no checkpoint in .* can be loaded: index-0.json .*cannot be read"),
        ({"model.pt": EIO}, f"no checkpoint in .* can be loaded: {name(3)} .model.pt cannot be read: "),
    ],
)
def test_a_store_that_fails_as_a_whole_is_an_error(latest: Any, faults: dict[str, OSError], told: str) -> None:
    with pytest.raises(OSError, match=told):
        latest(faults=faults)


def test_damaged_checkpoints_alone_are_no_error(latest: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can be loaded, now or later."""
    for step in (1, 2, 3):
        (tmp_path / name(step) / "model.pt").unlink()
    assert latest() is None
    assert f"latest_checkpoint finds no checkpoint and passes over {name(3)} (model.pt is missing), {name(2)} (" in (
        caplog.text
    )


def test_a_checkpoint_of_a_newer_version_alone_is_an_error(tmp_path: Path, latest: Any) -> None:
    for step in (1, 2, 3):
        path = tmp_path / name(step) / MANIFEST
        path.write_bytes(seal({**fields(path.read_bytes()), "format": 2}))
    with pytest.raises(OSError, match=r"manifest.json was written by a newer version of distributor \(format 2\)"):
        latest()


def test_the_second_best_takes_the_place_of_a_damaged_best(
    latest: Any, place: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog(place, BEST)
    for step, loss in ((4, 0.1), (5, 0.3), (6, 0.2), (7, 0.9)):
        save(catalog, place, step, loss=loss)
    (tmp_path / name(4) / "model.pt").unlink()
    assert latest("best_checkpoint", BEST) == 6
    assert f"best_checkpoint returns {name(6)} and passes over {name(4)} (model.pt is missing)" in caplog.text
    with pytest.raises(OSError, match=f"no checkpoint .* can be loaded: {name(4)} .*model.pt cannot be read"):
        latest("best_checkpoint", BEST, faults={"model.pt": EIO})


def test_a_url_that_fails_on_one_key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    place = open_storage("forgetful://bucket/run")
    catalog = Catalog(place, Checkpoints("x"))
    for step in (1, 2, 3):
        save(catalog, place, step)
    asked: list[str] = []

    def fail(operation: str, path: str) -> None:
        asked.append(path)
        if path.endswith((f"{name(3)}/model.pt", f"{name(2)}/{MANIFEST}")) and operation in ("read", "info"):
            raise ConnectionError("403 Forbidden")

    stores.BEFORE.append(fail)
    session = open_session(Checkpoints("forgetful://bucket/run"), {})
    monkeypatch.setattr(loading, "current", lambda *_, **__: session)
    found = loading.latest_checkpoint()
    assert found is not None and found.step == 1
    assert f"{name(2)} ({MANIFEST} cannot be read: 403 Forbidden)" in caplog.text
    assert f"{name(3)} (model.pt cannot be read: 403 Forbidden)" in caplog.text


def test_a_damaged_file_at_a_url_costs_its_own_checkpoint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``latest_checkpoint`` downloads the files, and so learns of it."""
    place = open_storage("forgetful://bucket/run")
    catalog = Catalog(place, Checkpoints("x"))
    for step in (1, 2):
        save(catalog, place, step)
    place.write(f"{name(2)}/model.pt", b"WEIGHTS OF STEP 2")
    session = open_session(Checkpoints("forgetful://bucket/run"), {})
    monkeypatch.setattr(loading, "current", lambda *_, **__: session)
    found = loading.latest_checkpoint()
    assert found is not None and found.step == 1
    assert f"returns {name(1)} and passes over {name(2)} (model.pt has other bytes than were saved)" in caplog.text


def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int | None:
    session = open_session(Checkpoints(str(tmp_path)), {})
    monkeypatch.setattr(loading, "current", lambda *_, **__: session)
    return loading.load_checkpoint({"value": 0})


@pytest.mark.parametrize("damage", ["unreadable", "changed"])
def test_the_true_reason_of_a_file_that_is_not_loaded(
    place: Storage, damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name(3) / "model.pt"
    if damage == "unreadable":  # its size is 0
        empty = Shard("model.pt", 0, zlib.crc32(b""))
        manifest = Catalog(place, Checkpoints("x")).read(name(3))
        assert manifest is not None
        place.write(f"{name(3)}/{MANIFEST}", sealed.seal(replace(manifest, shards=(empty,))))
        stores.unreadable(path)
    else:
        path.write_bytes(path.read_bytes().upper())
    with pytest.raises(Exception, match="the checkpoint of step 2 was written by checkpoint_folder"):
        load(monkeypatch, tmp_path)
    told = "cannot be read: [Errno 5] Input/output" if damage == "unreadable" else "has other bytes than were saved"
    assert f"load_checkpoint loads {name(2)} and passes over {name(3)} (model.pt {told}" in caplog.text


def test_files_of_checkpoint_folder_are_not_newer_than_a_state_in_memory(
    place: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = InMemory(name(2))
    monkeypatch.setattr(loading, "choose", lambda _: [kept])
    call = loading._Call(open_session(Checkpoints(str(tmp_path)), {}))
    assert loading._choose(call, None, {}) == kept


@pytest.mark.parametrize("error", [EIO, EACCES])
def test_what_cannot_be_read_stays_and_is_found_again(place: Storage, error: OSError, tmp_path: Path) -> None:
    """It is not removed, counts for none of those that are kept, and is not newer than what is committed meanwhile."""
    one = Checkpoints("x", keep=1)
    catalog = Catalog(stores.Faulty(place, {f"{name(3)}/{MANIFEST}": error}), one)  # type: ignore[arg-type]
    for step in (4, 5):
        save(catalog, place, step)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [name(3), name(5)]
    index = max((sealed.read(Index, (tmp_path / file).read_bytes()) for file in INDEX), key=lambda each: each.sequence)
    assert index.folders == (name(5), name(3))
    assert [each.step for each in Catalog(place, one).committed()] == [5, 3]


def test_what_cannot_be_read_is_older_than_what_is_committed_meanwhile(place: Storage, tmp_path: Path) -> None:
    """Even if the index that counts it cannot be read either."""
    newest = max(INDEX, key=lambda file: sealed.read(Index, (tmp_path / file).read_bytes()).sequence)
    faults: dict[str, OSError] = {f"{name(3)}/{MANIFEST}": EIO, newest: EIO}
    save(Catalog(stores.Faulty(place, faults), Checkpoints("x")), place, 4)  # type: ignore[arg-type]
    numbers = {each.step: each.number for each in Catalog(place, Checkpoints("x", keep=None)).committed()}
    assert numbers[4] > numbers[3]


def test_one_bad_record_stops_no_removal_of_others(place: Storage, tmp_path: Path) -> None:
    """A folder in the place of a manifest, and an abandoned folder whose manifest cannot be read."""
    torn = folder_name(9, "3f-0", 9)
    for folder in (name(2), torn):
        place.write(f"{folder}/other.pt", b"")
    catalog = Catalog(place, Checkpoints("x", keep=1))
    catalog.committed()
    (tmp_path / name(3) / MANIFEST).unlink()
    (tmp_path / name(3) / MANIFEST).mkdir()
    stores.unreadable(tmp_path / name(2) / MANIFEST)
    place.write(f"{folder_name(1, '3f-1', 1)}/model.pt", b"")
    catalog.commit(Draft(folder_name(1, "3f-1", 1), 1, 1, "3f-1", (), {}))
    left = {path.name for path in tmp_path.glob("step-*")}
    assert {name(1), torn} & left == set()
    assert {name(3), folder_name(1, "3f-1", 1)} <= left


@pytest.mark.parametrize("error", [EIO, IsADirectoryError(errno.EISDIR, "Is a directory")])
@pytest.mark.parametrize("file", INDEX)
def test_an_index_that_cannot_be_read_is_not_replaced(
    place: Storage, file: str, error: OSError, tmp_path: Path
) -> None:
    before = (tmp_path / file).read_bytes()
    catalog = Catalog(stores.Faulty(place, {file: error}), Checkpoints("x"))  # type: ignore[arg-type]
    for step in (4, 5):
        save(catalog, place, step)
    assert (tmp_path / file).read_bytes() == before
    assert [each.step for each in Catalog(place, Checkpoints("x")).committed()] == [5, 4, 3]


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        pytest.param({}, [[2, 3, 4], [4, 5], [5, 6]], id="missing"),
        pytest.param({f"{name(3)}/model.pt": EIO}, [[2, 3, 4], [3, 4, 5], [3, 5, 6]], id="unreadable"),
    ],
)
def test_checkpoints_that_cannot_be_loaded_take_no_room_of_good_ones(
    place: Storage,
    faults: dict[str, OSError],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With ``keep=2``, step 2 stays until two further steps are committed; step 3 goes with it only if it is lost."""
    session = open_session(replace(BEST, dir=str(tmp_path)), faults)
    monkeypatch.setattr(loading, "current", lambda *_, **__: session)
    if not faults:
        (tmp_path / name(3) / "model.pt").unlink()
    found = loading.latest_checkpoint()
    assert found is not None and found.step == 2
    left = []
    for step in (4, 5, 6):
        save(session.catalog, place, step)
        left.append(sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("step-*")))
    assert left == expected


def test_what_cannot_be_looked_at_is_not_abandoned(
    tmp_path: Path, place: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a folder has changed last is not known if one of its files cannot be looked at."""
    stat, torn = os.stat, [folder_name(9, f"{run}-0", 9) for run in ("aa", "bb")]
    for folder in torn:
        place.write(f"{folder}/model.pt", b"torn")
        for path in (tmp_path / folder / "model.pt", tmp_path / folder):
            os.utime(path, (1, 1))

    def fail(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(f"{torn[0]}/model.pt"):
            raise ESTALE
        return stat(path, *arguments, **options)

    monkeypatch.setattr(storage.os, "stat", fail)
    save(Catalog(place, Checkpoints("x")), place, 4)
    assert [(tmp_path / folder).exists() for folder in torn] == [True, False]


def test_a_commit_looks_only_into_folders_that_may_be_abandoned(
    tmp_path: Path, place: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may hold many files, such as the snapshots of a run's data."""
    walk, looked, torn = os.walk, list[str](), folder_name(9, "aa-0", 9)
    for folder in ("data-train-01234567", torn):
        place.write(f"{folder}/part", b"")

    def note(path: Any, **options: Any) -> Any:
        looked.append(Path(path).name)
        return walk(path, **options)

    monkeypatch.setattr(storage.os, "walk", note)
    save(Catalog(place, Checkpoints("x", keep=None)), place, 4)
    assert looked == [torn]


def test_a_url_that_has_failed_is_not_asked_for_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it answers, so that a store that fails as a whole is an error soon, however many files it has."""
    slept: list[float] = []
    monkeypatch.setattr(storage, "PAUSES", (0.1, 0.3, 1.0, 3.0, 9.0))
    monkeypatch.setattr(storage.time, "sleep", slept.append)
    place = open_storage("forgetful://bucket/run")
    stores.BEFORE.append(stores.fail_every(1))
    for _ in range(2):
        with pytest.raises(ConnectionError):
            place.read("x")
    assert slept == [0.1, 0.3, 1.0, 3.0, 9.0, 0.1, 0.3]
    stores.BEFORE.clear()
    assert place.read("x") is None
    stores.BEFORE.append(stores.fail_every(1))
    with pytest.raises(ConnectionError):
        place.read("x")
    assert len(slept) == 12
