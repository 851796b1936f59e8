"""Snapshots of tables that are no Spark DataFrames: rules for nulls, reuse, and what a failure leaves."""

import datetime
import os
import re
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distributor.data import local_tables, snapshots, writer
from distributor.data.loader import RankDataset
from distributor.data.snapshots import snapshot
from distributor.data.source import Data
from distributor.data.writer import write_part
from distributor.errors import ConfigurationError, ResourceError, RunCancelledError
from distributor.values.dataset import Dataset

NULLS = {"a": [1.0, None, 3.0, 4.0], "b": [1, 2, None, 4], "name": ["w", "x", "y", None], "list": [[1], [2], [3], [4]]}


def written(folder, source, **options):
    """Everything in a snapshot, in the order of the table."""
    snapshots.write(Data(source, **options), str(folder))
    (batch,) = RankDataset.open(Dataset(str(folder), 1), 0, 1).loader(batch_size=100)
    count = int(batch.pop("_valid").sum())
    return {
        name: value[:count].tolist() if hasattr(value, "tolist") else value[:count] for name, value in batch.items()
    }


def test_nulls_are_errors_with_columns_and_counts(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nulls in 'a' \(1\), 'b' \(1\), 'name' \(1\): pass Data\(.*drop"):
        snapshots.write(Data(pa.table(NULLS)), str(tmp_path / "it"))
    assert not (tmp_path / "it").exists()


def test_rows_with_nulls_are_dropped(tmp_path):
    assert written(tmp_path / "it", pa.table(NULLS), nulls="drop") == {
        "a": [1.0],
        "b": [1],
        "name": ["w"],
        "list": [[1]],
    }


def test_a_null_in_a_list_drops_its_row(tmp_path):
    table = pa.table({"a": [1, 2, 3], "list": [[1, None], None, [5, 6]]}).slice(0)
    assert written(tmp_path / "it", table, nulls="drop") == {"a": [3], "list": [[5, 6]]}


def test_nulls_are_filled(tmp_path):
    found = written(tmp_path / "it", pa.table(NULLS), nulls="fill")
    assert (found["a"], found["b"], found["name"]) == ([1, 0, 3, 4], [1, 2, 0, 4], ["w", "x", "y", ""])


def test_nulls_are_filled_with_values_by_column(tmp_path):
    found = written(tmp_path / "it", pa.table(NULLS), nulls={"a": -1, "b": 9, "name": "?"})
    assert (found["a"], found["b"], found["name"]) == ([1, -1, 3, 4], [1, 2, 9, 4], ["w", "x", "y", "?"])
    with pytest.raises(ConfigurationError, match=r"nulls in 'b' \(1\), 'name' \(1\)"):
        snapshots.write(Data(pa.table(NULLS), nulls={"a": -1}), str(tmp_path / "other"))


OTHERS = {
    "flag": [True, None],
    "day": [datetime.date(1970, 1, 2), None],
    "at": [datetime.datetime(1970, 1, 1, 0, 0, 1), None],
    "price": [Decimal("1.5"), None],
    "flags": [[True, None], [None]],
}


@pytest.mark.parametrize("nulls", ["fill", "mask"])
def test_nulls_of_all_types_are_filled(tmp_path, nulls):
    found = written(tmp_path / "it", pa.table(OTHERS), nulls=nulls)
    assert [found[name] for name in ("flag", "day", "at", "price")] == [
        [True, False], [1, 0], [1_000_000, 0], [1.5, 0.0]
    ]  # fmt: skip
    assert [each.tolist()[:3] for each in found["flags"]] == [[True, False, False], [0, 2, 3]]


def test_nulls_of_all_types_become_given_values(tmp_path):
    nulls = {"flag": True, "day": 7, "at": -1, "price": Decimal("2.5"), "flags": True}
    found = written(tmp_path / "it", pa.table(OTHERS), nulls=nulls)
    assert [found[name] for name in ("flag", "day", "at", "price")] == [
        [True, True], [1, 7], [1_000_000, -1], [1.5, 2.5]
    ]  # fmt: skip
    assert [each.tolist()[:3] for each in found["flags"]] == [[True, True, True], [0, 2, 3]]


def test_nulls_are_masked(tmp_path):
    found = written(tmp_path / "it", pa.table(NULLS), pack={"x": ["a", "b"]}, columns=["name"], nulls="mask")
    assert found["x"] == [[1, 1], [0, 2], [3, 0], [4, 4]]
    assert found["x_mask"] == [[True, True], [False, True], [True, False], [True, True]]
    assert found["name_mask"] == [True, True, True, False]


def test_a_list_that_is_null_cannot_be_filled(tmp_path):
    with pytest.raises(ConfigurationError, match=r"column 'list' has 1 lists that are null.*nulls='drop'"):
        snapshots.write(Data(pa.table({"list": [[1], None]}), nulls="fill"), str(tmp_path / "it"))


@pytest.mark.parametrize(("dtype", "value"), [("int8", 300), ("bool", 2), ("bool", 300), ("uint8", -1)])
def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path, dtype, value):
    with pytest.raises(ConfigurationError, match=rf"column 'a' has values such as {value} that dtype '{dtype}' cannot"):
        snapshots.write(Data(pa.table({"a": [1, value, 0]}), dtypes={"a": dtype}), str(tmp_path / "it"))


def test_a_table_without_rows_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no rows"):
        snapshots.write(Data(pa.table({"a": pa.array([], pa.int64())})), str(tmp_path / "it"))


def test_large_tables_are_cut_into_blocks(tmp_path):
    table = pa.table({"x": np.zeros((1_000_000, 1), "float32").reshape(-1), "text": ["a" * 10] * 1_000_000})
    manifest = snapshots.write(Data(table), str(tmp_path / "it"))
    (part,) = manifest.parts
    assert sum(part.rows) == 1_000_000
    assert len(part.rows) > 5
    sizes = [end - begin for begin, end in zip(part.places[0::5], part.places[1::5])]
    assert max(sizes) < 4 << 20


def test_small_batches_are_measured_once(monkeypatch):
    measured = []

    class Small:
        num_rows = 1

        @property
        def nbytes(self):
            measured.append(self)
            return 1

    monkeypatch.setattr(writer, "_joined", len)
    assert list(writer._blocks(Small() for _ in range(100))) == [100]
    assert len(measured) == 100


def test_pandas_and_parquet_are_tables_too(tmp_path):
    table = pa.table({"a": [1, 2, 3]})
    for number in range(2):
        pq.write_table(table.slice(number, 1), tmp_path / f"{number}.parquet", row_group_size=1)
    assert written(tmp_path / "1", str(tmp_path / "*.parquet")) == {"a": [1, 2]}
    assert written(tmp_path / "2", str(tmp_path)) == {"a": [1, 2]}
    assert written(tmp_path / "3", table.to_pandas()) == {"a": [1, 2, 3]}
    with pytest.raises(ConfigurationError, match="no snapshot and no Parquet file at"):
        snapshots.check(Data(str(tmp_path / "*.csv")))
    with pytest.raises(ConfigurationError, match="not list"):
        snapshots.check(Data([1]))


def test_what_spark_has_not_committed_is_no_table(tmp_path):
    top = tmp_path / "_mine"
    hidden = ["_temporary/0/part-1.parquet", ".stage/part-1.parquet", "_part-1.parquet", "day=1/_temporary/1.parquet"]
    for number, name in enumerate(["_day=1/0.parquet", "day=1/0.parquet", *hidden]):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"a": [number]}), top / name)
    found = {"": [0, 1], "*/*.parquet": [0, 1], "**/*.parquet": [0, 1]}
    named = {"_temporary/**/*.parquet": [2], ".stage/*.parquet": [3], "_p*.parquet": [4], "_*/**/*.parquet": [0, 2]}
    for number, (pattern, rows) in enumerate((found | named).items()):
        assert written(tmp_path / str(number), os.path.join(str(top), pattern)) == {"a": rows}
    with pytest.raises(ConfigurationError, match="no Parquet file"):
        snapshots.check(Data(str(top / "*.parquet")))
    top.rename(tmp_path / "as_by_spark.parquet")
    assert written(tmp_path / "folder", str(tmp_path / "as_by_spark.parquet")) == {"a": [0, 1]}


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ({"a": [3], "label": [4]}, r"column 'b' is int in .*0\.parquet' but missing in .*1\.parquet': write all files"),
        ({"a": [3], "b": ["4"], "label": [5]}, r"column 'b' is int in .*0\.parquet' but string in .*1\.parquet'"),
        ({"a": [3], "b": pa.array([4], pa.int64()), "label": [5]}, r"'b' is int in .* but bigint in .*1\.parquet'"),
    ],
)
def test_files_with_other_columns_are_refused(tmp_path, later, words):
    kinds = {"a": pa.int32(), "b": pa.int32(), "label": pa.int32()}
    pq.write_table(pa.table({name: pa.array([1], kind) for name, kind in kinds.items()}), tmp_path / "0.parquet")
    later = pa.table(later)
    later = later.set_column(0, "a", later["a"].cast(pa.int32()))
    pq.write_table(later, tmp_path / "1.parquet")
    options = {"pack": {"x": ["a", "b"]}}
    with pytest.raises(ConfigurationError, match=words):
        snapshots.write(Data(str(tmp_path / "*.parquet"), **options), str(tmp_path / "it"))
    assert not (tmp_path / "it").exists()
    assert written(tmp_path / "it", str(tmp_path / "*.parquet"), columns=["a"]) == {"a": [1, 3]}


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([[1], [2], [3]], names=["a", "a", "label"])
    pq.write_table(table, tmp_path / "0.parquet")
    frame = table.to_pandas()
    for source, place in [(table, "the table"), (frame, "the DataFrame"), (str(tmp_path), r"the file '.*0\.parquet'")]:
        with pytest.raises(ConfigurationError, match=f"Data: {place} has two columns 'a': rename one"):
            snapshots.check(Data(source, label="label"))


def test_a_snapshot_is_used_again_unless_other_columns_are_asked_for(tmp_path, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / "kept"
    data = snapshot(Data(pa.table({"a": [1, 2], "b": [3, 4]}), columns=["a"], lanes=6), folder)
    assert (data.source, data.lanes) == (str(folder), 6)
    before = os.stat(folder / "snapshot.json").st_mtime_ns
    snapshot(Data(pa.table({"a": [1, 2], "b": [3, 4]}), columns=["a"]), folder)
    assert os.stat(folder / "snapshot.json").st_mtime_ns == before
    assert "uses the snapshot" in caplog.text
    assert "cannot be told" not in caplog.text
    with pytest.raises(ConfigurationError, match=r"another source or of other columns, 2 rows written at .*: remove"):
        snapshot(Data(pa.table({"a": [1, 2], "b": [3, 4]}), columns=["b"]), folder)
    with pytest.raises(ConfigurationError, match="is a snapshot, which has its columns already"):
        snapshots.check(Data(str(folder), columns=["a"]))


def tables(rows, tmp_path):
    """The same rows as a table, in other batches, as a pandas DataFrame and in a Parquet file."""
    table = pa.table(rows)
    pq.write_table(table, tmp_path / "it.parquet", row_group_size=1)
    parts = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    return {"table": table, "parts": parts, "pandas": table.to_pandas(), "file": str(tmp_path / "it.parquet")}


@pytest.mark.parametrize("kind", ["table", "parts", "pandas", "file"])
@pytest.mark.parametrize(
    "later",
    [
        {"a": [1, 2, 4], "t": ["x", "yz", ""], "l": [[1], [], [2, 3]]},
        {"a": [1, 2, 3], "t": ["x", "y", "z"], "l": [[1], [], [2, 3]]},
        {"a": [1, 2, 3], "t": ["xy", "z", ""], "l": [[1], [], [2, 3]]},
        {"a": [1, 2, 3], "t": ["x", "yz", ""], "l": [[1], [2], [3]]},
        {"a": [1, 2, 3, 3], "t": ["x", "yz", "", ""], "l": [[1], [], [2, 3], []]},
    ],
)
def test_rows_that_have_changed_are_another_source(tmp_path, kind, later):
    rows = {"a": [1, 2, 3], "t": ["x", "yz", ""], "l": [[1], [], [2, 3]]}
    snapshot(tables(rows, tmp_path)["table"], tmp_path / "kept")
    for same in tables(rows, tmp_path).values():
        snapshot(same, tmp_path / "kept")
    with pytest.raises(ConfigurationError, match="a snapshot of another source"):
        snapshot(tables(later, tmp_path)[kind], tmp_path / "kept")


def test_a_list_and_a_tuple_of_columns_are_the_same(tmp_path):
    for columns in (["a"], ("a",)):
        snapshot(Data(pa.table(NULLS), pack={"x": columns}, columns=columns, nulls="drop"), tmp_path / "kept")


def test_what_another_driver_has_written_meanwhile_stays(tmp_path):
    folder = tmp_path / "kept"

    def rows():
        yield from pa.table({"a": [1, 2]}).to_batches()
        snapshots.write(Data(pa.table({"a": [1, 2, 3]})), str(folder))
        yield from pa.table({"a": pa.array([None], pa.int64())}).to_batches()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigurationError, match="nulls in 'a'"):
        table = local_tables.LocalTable({"a": "bigint"}, lambda names: rows())
        opened = [table, local_tables.open_table(pa.table({"a": [1, 2, 3]}))]
        patch.setattr(local_tables, "open_table", lambda source: opened.pop(0))
        snapshots.write(Data(None), str(folder))
    assert snapshots.find(str(folder)).rows == 3
    assert len(list(folder.glob("files-*"))) == 1


def test_a_run_that_is_cancelled_copies_no_more_rows(tmp_path):
    asked = []
    with pytest.raises(RunCancelledError, match="cancelled while its data was written"):
        snapshots.write(
            Data(pd.DataFrame({"a": np.zeros(1_000_000)})),
            str(tmp_path / "it"),
            wanted=lambda: asked.append(1) or len(asked) < 3,
        )
    assert len(asked) == 3
    assert list(tmp_path.iterdir()) == []


def spoil(path):
    content = bytearray(path.read_bytes())
    content[100:400] = b"\xff" * 300
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        spoil,
        lambda path: os.truncate(path, 500),
        lambda path: os.truncate(path, 0),
        os.remove,
        lambda path: (path.unlink(), path.symlink_to("nowhere")),
    ],
    ids=["corrupt", "cut", "empty", "removed", "link"],
)
@pytest.mark.parametrize("name", ["1.parquet", "2.parquet"])
def test_a_parquet_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, harm, name):
    for number in (1, 2):
        table = pa.table({"a": np.arange(1000), "t": [f"text {row}" for row in range(1000)]})
        pq.write_table(table, tmp_path / f"{number}.parquet", use_dictionary=False)
    if harm is os.remove:
        found = [str(tmp_path / "1.parquet"), str(tmp_path / "2.parquet")]
        monkeypatch.setattr(local_tables, "_files", lambda pattern: found)
    harm(tmp_path / name)
    with pytest.raises(ConfigurationError) as caught:
        snapshots.write(Data(str(tmp_path / "*.parquet")), str(tmp_path / "it"))
    assert f"the Parquet file {str(tmp_path / name)!r} cannot be read: " in str(caught.value)
    assert "written" not in str(caught.value)
    assert not (tmp_path / "it").exists()


def test_a_path_in_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "it.parquet")
    assert written(tmp_path / "kept", "~/it.parquet") == {"a": [1]}
    assert snapshots.is_snapshot(Data("~/kept"))


def test_a_text_that_is_no_unicode_is_refused(tmp_path):
    table = pa.table({"t": pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())})
    with pytest.raises(ConfigurationError, match="column 't' has texts that are not UTF-8.*binary"):
        snapshots.write(Data(table), str(tmp_path / "it"))


def test_small_whole_numbers_without_sign_stay_so(tmp_path):
    table = pa.table(
        {"a": pa.array([0, None, 255], pa.uint8()), "l": pa.array([[1], [2], [200]], pa.list_(pa.uint8()))}
    )
    assert written(tmp_path / "it", table, nulls={"a": 7}) == {"a": [0, 7, 255], "l": [[1], [2], [200]]}
    fields = snapshots.find(str(tmp_path / "it")).fields
    assert [each.dtype for each in fields] == ["uint8", "uint8"]


BIG = 2**53 + 1


@pytest.mark.parametrize("nulls", ["error", "fill", {"a": -1}])
def test_decimals_become_whole_numbers_exactly(tmp_path, nulls):
    values = [Decimal(BIG), Decimal(-BIG), Decimal(0) if nulls == "error" else None]
    table = pa.table({"a": pa.array(values, pa.decimal128(38, 2))})
    found = written(tmp_path / "it", table, dtypes={"a": "int64"}, nulls=nulls)
    assert found["a"] == [BIG, -BIG, -1 if isinstance(nulls, dict) else 0]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int64", "9007199254740993.50"), ("int64", "9223372036854775808.00"), ("int8", "128.00"), ("int64", "0.25")],
)
def test_decimals_that_are_no_such_whole_numbers_are_refused(tmp_path, dtype, value):
    table = pa.table({"a": pa.array([Decimal(1), Decimal(value)], pa.decimal128(38, 2))})
    number = re.escape(value).replace(r"\.00", "")
    with pytest.raises(ConfigurationError, match=rf"values such as {number}.* that dtype '{dtype}' cannot hold"):
        snapshots.write(Data(table, dtypes={"a": dtype}), str(tmp_path / "it"))


@pytest.mark.parametrize(("dtype", "value"), [("float16", 70_000), ("float16", -70_000.0), ("float32", 1e39)])
def test_numbers_that_would_become_infinite_are_refused(tmp_path, dtype, value):
    with pytest.raises(ConfigurationError, match=rf"values such as {value!r} that dtype".replace("+", r"\+")):
        snapshots.write(Data(pa.table({"a": [1, value]}), dtypes={"a": dtype}), str(tmp_path / "it"))
    endless = written(tmp_path / "other", pa.table({"a": [float("inf"), 1.0]}), dtypes={"a": dtype})
    assert endless["a"] == [float("inf"), 1.0]


def test_files_of_repeated_tasks_are_removed(tmp_path, monkeypatch):
    def twice(folder, recipe, index, batches):
        batches = [*batches]
        write_part(folder, recipe, index, batches)
        return write_part(folder, recipe, index, batches)

    monkeypatch.setattr(writer, "write_part", twice)
    assert written(tmp_path / "it", pa.table({"a": [1, 2]})) == {"a": [1, 2]}
    assert len(list(tmp_path.glob("it/*/*.arrow"))) == 1


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, full_disk):
    table = pa.table({"a": np.arange(2_000_000)})
    with pytest.raises(ResourceError, match=r"the data cannot be written: .*No space left on device"):
        snapshots.write(Data(table), str(full_disk / "it"))
    assert list(full_disk.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be written to '.*file/it'"):
        snapshots.write(Data(pa.table({"a": [1]})), str(tmp_path / "file" / "it"))
