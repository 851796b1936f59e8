"""Snapshots beside checkpoints: which of them a run's end, and the next run's start, leave there."""

import errno
import os
from contextlib import nullcontext

import pyarrow as pa
import pytest
from jobs import make_job

from distributor.checkpoint.catalog import Catalog, Draft
from distributor.checkpoint.records import INDEX, MANIFEST, folder_name
from distributor.data import feeding, snapshots
from distributor.data.source import Data
from distributor.machine.storage import Folder, open_storage
from distributor.values.checkpoints import Checkpoints
from distributor.values.dataset import MANIFEST as SNAPSHOT
from distributor.values.lease_record import FencingToken


@pytest.fixture
def place(tmp_path):
    return tmp_path / "saved"


@pytest.fixture(params=["{}", "file://{}"], ids=["folder", "url"])
def where(request, place):
    return request.param.format(place)


def feed(where, *names, held=True, rows=(1, 2, 3), **options):
    data = {name: Data(pa.table({"a": rows}), **options) for name in names or ("train",)}
    fence = FencingToken(str(where), "3f2a") if held else None
    return feeding.feed(make_job(checkpoints=Checkpoints(str(where)), fence=fence), data, lambda: True)


def save(where, step=1):
    catalog = Catalog(open_storage(str(where)), Checkpoints(str(where)))
    catalog.commit(Draft(folder_name(step, "3f2a-0", step), step, 1, "3f2a-0", (), {}))


def kept(place):
    return sorted(path.name for path in place.glob("data-*"))


def stale(*_):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("failure", [None, ValueError("of the training")])
def test_a_store_that_fails_at_the_end_changes_no_result(place, monkeypatch, caplog, failure):
    with (
        monkeypatch.context() as patch,
        nullcontext() if failure is None else pytest.raises(ValueError, match="of the training"),
        feed(place, "train", "test"),
    ):
        patch.setattr(Folder, "folders", stale)
        if failure is not None:
            raise failure
    assert len(kept(place)) == 2
    assert caplog.text.count("Stale file handle; the next run there removes it unless a checkpoint needs it") == 1
    with feed(place, "train", "test"):
        pass
    assert kept(place) == []


@pytest.mark.parametrize("hidden", [MANIFEST, INDEX[0]])
def test_data_stays_while_a_checkpoint_cannot_be_read(place, monkeypatch, caplog, hidden):
    """A manifest that cannot be read now may be whole, and so may an index, which may name more."""
    with feed(place):
        save(place)
    read = Folder.read

    def fail(self, name):
        return stale() if name.endswith(hidden) else read(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "read", fail)
        with feed(place, dtypes={"a": "float32"}):
            assert len(kept(place)) == 2
    assert len(kept(place)) == 2
    assert "Stale file handle" in caplog.text
    with feed(place, dtypes={"a": "float32"}):
        pass
    assert len(kept(place)) == 2, "the checkpoint is of the first"
    (place / folder_name(1, "3f2a-0", 1) / MANIFEST).write_bytes(b"damaged")
    with feed(place, dtypes={"a": "float32"}):
        pass
    assert kept(place) == []


def test_data_goes_on_while_a_checkpoint_cannot_be_read(place, monkeypatch):
    with feed(place):
        save(place)
    before = kept(place)
    monkeypatch.setattr(Catalog, "read", stale)
    with feed(place):
        assert kept(place) == before
    assert kept(place) == before


def test_a_run_gets_the_rows_that_it_was_given(place):
    """Another snapshot's state is refused by the loader."""
    with feed(place) as job:
        save(place)
        first = job.data["train"]
    with feed(place) as job:
        assert job.data["train"] == first
    with feed(place, rows=[7, 8, 9, 10]) as job:
        assert snapshots.find(job.data["train"].folder).rows == 4
        assert job.data["train"].snapshot != first.snapshot


def test_what_a_killed_driver_has_begun_is_removed_by_the_next_that_holds_the_place(place, where):
    with feed(where):
        save(where)
    (begun,) = kept(place)
    (place / begun / SNAPSHOT).rename(place / begun / f".{SNAPSHOT}.part")
    own = {"data-train-20240101": "train.csv", "data-train-eval-20240101": "files-00000000/train.csv"}
    for folder, file in own.items():
        (place / folder / file).parent.mkdir(parents=True)
        (place / folder / file).touch()
    with feed(where, held=False):
        assert begun in kept(place)
    with feed(where):
        assert begun not in kept(place)
    assert {*own} < {*kept(place)}


def test_nothing_continues_with_data_that_was_partly_removed(place, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), feed(place):
        patch.setattr(Folder, "remove_folder", killed)
    assert len(kept(place)) == 1
    assert not list(place.glob(f"*/{SNAPSHOT}"))
