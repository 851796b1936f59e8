"""Snapshots beside checkpoints: which of them a run's end, and the next run's start, leave there."""

import errno
import os
from contextlib import nullcontext

import pyarrow as pa
import pytest
from jobs import make_job

from distributor.checkpoint.catalog import Catalog, Draft
from distributor.checkpoint.records import folder_name
from distributor.data import feeding
from distributor.data.source import Data
from distributor.machine.storage import Folder
from distributor.values.checkpoints import Checkpoints

TABLE = {"a": [1, 2, 3]}


@pytest.fixture
def place(tmp_path):
    return tmp_path / "saved"


def feed(place, *names, table=TABLE, **options):
    data = {name: Data(pa.table(table), **options) for name in names or ("train",)}
    return feeding.feed(make_job(checkpoints=Checkpoints(str(place))), data, lambda: True)


def save(place, step=1):
    catalog = Catalog(Folder(place), Checkpoints(str(place)))
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
