"""Snapshots at URLs: the same rows as in a folder, read in ranges, and what is wrong in words."""

import itertools

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import stores

from distributor.data import snapshots
from distributor.data.loader import RankDataset
from distributor.data.reader import DataError
from distributor.data.source import Data
from distributor.errors import ConfigurationError
from distributor.machine import storage
from distributor.values.dataset import Dataset

ROWS = 1000


@pytest.fixture
def url(monkeypatch, tmp_path):
    """A place in a store whose listings show nothing."""
    monkeypatch.setattr(storage, "PAUSES", ())
    stores.FILES.clear()
    yield f"forgetful://{tmp_path.name}/points"
    stores.FILES.clear()
    stores.BEFORE.clear()


@pytest.fixture
def table():
    return pa.table(
        {
            "y": np.arange(ROWS),
            "text": [f"t{row}" if row % 3 else "" for row in range(ROWS)],
            "list": [list(range(row % 4)) for row in range(ROWS)],
        }
    )


def open_loader(place, rank=0, world_size=1):
    return RankDataset.open(Dataset(place, 12), rank, world_size).loader(global_batch_size=48, shuffle=True)


def rows(batches):
    return [(batch["y"].tolist(), batch["text"], [each.tolist() for each in batch["list"]]) for batch in batches]


def data_file():
    return next(name for name in stores.FILES if name.endswith(".arrow"))


def test_rows_are_those_of_a_folder(url, table, tmp_path):
    data = snapshots.snapshot(Data(table), url)
    snapshots.write(Data(table), str(tmp_path / "points"))
    assert (data.source, snapshots.is_snapshot(data)) == (url, True)
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        at_url, there = (open_loader(place, rank, world_size) for place in (url, str(tmp_path / "points")))
        for _ in range(2):
            assert rows(at_url) == rows(there)


def test_a_snapshot_is_used_again(url, table):
    snapshots.snapshot(Data(table), url)
    before = dict(stores.FILES)
    snapshots.snapshot(Data(table), url)
    assert stores.FILES == before
    with pytest.raises(ConfigurationError, match="a snapshot of another source or of other columns"):
        snapshots.snapshot(Data(table, columns=["y"]), url)


def test_windows_of_all_lanes_are_read_together(url):
    snapshots.write(Data(pa.table({"y": np.arange(ROWS)})), url)
    asked = []
    found = fsspec.filesystem("forgetful")
    real = type(found).cat_ranges

    def counted(self, paths, *arguments, **options):
        asked.append(len(paths))
        return real(self, paths, *arguments, **options)

    type(found).cat_ranges = counted
    try:
        next(iter(open_loader(url)))
    finally:
        type(found).cat_ranges = real
    assert max(asked) >= 12
    assert len(asked) < 12


def test_a_run_continues_from_a_url(url, table, tmp_path):
    snapshots.write(Data(table), url)
    whole, first = rows(open_loader(url)), open_loader(url)
    begun = rows(itertools.islice(first, 5))
    rest = open_loader(url)
    rest.load_state_dict(first.state_dict())
    assert begun + rows(rest) == whole


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda name: stores.FILES.pop(name), r"data at forgetful://.* cannot be read: .*No such file.*\.arrow"),
        (lambda name: stores.FILES.update({name: stores.FILES[name][:600]}), r"\.arrow of the data has no bytes"),
        (
            lambda name: stores.FILES.update({name: stores.FILES[name].replace(b"t500", b"x500")}),
            r"\.arrow of the data has changed: block 0 has another checksum",
        ),
    ],
)
def test_damage_is_named(url, table, damage, words):
    snapshots.write(Data(table), url)
    loader = open_loader(url)
    damage(data_file())
    with pytest.raises(DataError, match=words):
        list(loader)
    stores.FILES.clear()
    with pytest.raises(DataError, match=r"snapshot forgetful://.* cannot be read on this node: No such file"):
        open_loader(url)


def test_a_store_that_refuses_files_is_named_and_nothing_is_left(url, table):
    def refuse(operation, path):
        if operation == "upload":
            raise PermissionError(13, "Permission denied")

    stores.BEFORE.append(refuse)
    with pytest.raises(ConfigurationError, match=r"cannot be written: Permission denied \(while it wrote forgetful"):
        snapshots.write(Data(table), url)
    assert stores.FILES == {}


def test_a_url_that_cannot_be_used_is_named():
    with pytest.raises(ConfigurationError, match=r"Data\('nowhere://a'\) cannot be read: .*nowhere"):
        snapshots.check(Data("nowhere://a"))
