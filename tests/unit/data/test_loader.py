"""What a rank's loader delivers: the rows that the plan says, at any width, from where a state says."""

import datetime
import decimal
import functools
import itertools
import operator
import os
import tempfile
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings, strategies as st

from distributor.data import row_order, snapshots
from distributor.data.loader import RankDataset, _Deliver
from distributor.data.reader import DataError
from distributor.data.source import Data
from distributor.errors import ConfigurationError
from distributor.values.dataset import Dataset

ROWS = 1000


def columns(rows=ROWS):
    return {"x1": np.arange(rows, dtype="float32"), "x2": -np.arange(rows, dtype="float32"), "y": np.arange(rows)}


def write(folder, table=None, lanes=12, **options):
    options = options or {"pack": {"x": ["x1", "x2"]}, "label": "y"}
    snapshots.write(Data(pa.table(columns()) if table is None else table, **options), str(folder))
    return Dataset(str(folder), lanes)


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "points")


def loader(dataset, rank=0, world_size=1, **options):
    return RankDataset.open(dataset, rank, world_size).loader(**{"global_batch_size": 48, "shuffle": True, **options})


def rows_of(loader):
    return [batch["y"].tolist() for batch in loader]


def together(dataset, world_size, **options):
    """The global batches of an epoch."""
    ranks = [rows_of(loader(dataset, rank, world_size, **options)) for rank in range(world_size)]
    return [functools.reduce(operator.iadd, parts, []) for parts in zip(*ranks, strict=True)]


def test_rows_belong_together_and_come_as_planned(there):
    table = loader(there)
    plan = table._plan
    for step, batch in enumerate(table):
        assert batch["y"].tolist() == plan.batch(step).tolist()
        assert batch["x"].tolist() == [[row, -row] for row in batch["y"].tolist()]
    assert (batch["x"].dtype, batch["y"].dtype) == (torch.float32, torch.int64)
    assert step + 1 == len(table) == 20


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": False}])
def test_global_batches_are_the_same_for_all_widths(there, options):
    alone = together(there, 1, **options)
    assert all(together(there, width, **options) == alone for width in (2, 3, 4, 6, 12))


def test_evaluation_marks_the_rows_that_it_repeats(there):
    seen = []
    for batch in loader(there, shuffle=False):
        seen += batch["y"][batch["_valid"]].tolist()
    assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize(("width", "window_bytes"), [(1, 1), (12, 1), (12, 2000)])
def test_batches_that_wait_keep_the_marks_of_their_rows(there, monkeypatch, width, window_bytes):
    """Windows of one and of two batches are read anew while batches wait."""
    monkeypatch.setattr(row_order, "WINDOW_BYTES", window_bytes)
    seen = []
    for rank in range(width):
        for batch in list(loader(there, rank, width, shuffle=False)):
            seen += batch["y"][batch["_valid"]].tolist()
    assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize("width", [1, 2, 6])
def test_every_step_can_be_continued_at_another_width(there, width):
    whole = together(there, 1)
    for step in range(0, 20, 3):
        first = loader(there, 0, 3)
        batches = iter(first)
        for _ in range(step):
            next(batches)
        state = first.state_dict()
        rest = []
        for rank in range(width):
            resumed = loader(there, rank, width)
            resumed.load_state_dict(state)
            rest.append(rows_of(resumed))
        assert [functools.reduce(operator.iadd, parts, []) for parts in zip(*rest, strict=True)] == whole[step:]


def test_a_state_counts_what_was_delivered_and_is_the_same_on_all_ranks(there):
    ranks = [loader(there, rank, 2) for rank in range(2)]
    for each in ranks:
        next(iter(each))
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert (ranks[0].state_dict()["epoch"], ranks[0].state_dict()["step"]) == (0, 1)


def test_epochs_are_counted_and_an_interrupted_one_is_finished(there):
    first = loader(there)
    seen = []
    for epoch in first.epochs(2):
        for batch in first:
            seen.append((epoch, batch["y"].tolist()))
            if len(seen) == 25:
                state = first.state_dict()
    assert first.epoch == 2
    resumed = loader(there)
    resumed.load_state_dict(state)
    again = [(epoch, batch["y"].tolist()) for epoch in resumed.epochs(2) for batch in resumed]
    assert again == seen[25:]
    assert seen[0][1] != seen[20][1], "the second epoch has the same order"


def test_an_epoch_that_was_left_early_is_not_repeated(there):
    table = loader(there)
    for _ in table.epochs(2):
        for _ in table:
            break
    assert table.epoch == 2


def test_a_look_at_a_batch_before_the_epochs_costs_none(there):
    table = loader(there)
    first = next(iter(table))["y"].tolist()
    seen = [(epoch, batch["y"].tolist()) for epoch in table.epochs(2) for batch in table]
    assert seen[0] == (0, first)
    assert [epoch for epoch, _ in seen] == [0] * len(table) + [1] * len(table)


def test_a_resumed_epoch_is_not_begun_anew_by_epochs(there):
    table, seen = loader(there), 0
    for _ in table.epochs(1):
        for _ in table:
            seen += 1
            if seen == 5:
                break
        state = table.state_dict()
    resumed = loader(there)
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert [len(rows_of(resumed)) for _ in resumed.epochs(2)] == [len(table) - 5, len(table)]


def take(count, batches):
    return [batch["y"].tolist() for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("map", [None, dict])
@pytest.mark.parametrize("last", [10, 20])
def test_a_state_that_is_loaded_within_the_loop_continues_at_the_next_batch(there, map, last):
    table, seen = loader(there, map=map), []
    whole = rows_of(loader(there))
    for batch in table:
        seen.append(batch["y"].tolist())
        if len(seen) == 5:
            state = table.state_dict()
        if len(seen) == last:
            table.load_state_dict(state)
    assert seen == whole[:last] + whole[5:]
    assert table.epoch == 1


def test_a_state_with_other_windows_is_loaded_within_the_loop(there, monkeypatch):
    table, other = loader(there), loader(there, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(row_order, "WINDOW_BYTES", 2000)
        small = loader(there, seed=1)
    state, seen = small.state_dict(), []
    assert state["window"] < table.state_dict()["window"]
    for batch in table:
        seen.append(batch["y"].tolist())
        if len(seen) == 3:
            table.load_state_dict(state)
    assert seen[3:] == rows_of(small) != rows_of(other)
    assert [len(rows) for rows in rows_of(table)] == [48] * 20


def test_an_epoch_before_that_is_loaded_within_the_loop_is_repeated(there):
    table, epochs = loader(there), []
    state = table.state_dict()
    for epoch in table.epochs(3):
        for _ in table:
            epochs.append(table.epoch)
            if len(epochs) == 25:
                table.load_state_dict(state)
    assert epoch == 2
    assert len(epochs) == 25 + 3 * 20


def test_a_loader_that_is_iterated_twice_at_once_says_so(there):
    table = loader(there)
    batches = iter(table)
    take(3, batches)
    (first,) = take(1, iter(table))
    with pytest.raises(ConfigurationError, match=r"iterated elsewhere.*loader of its own"):
        next(batches)
    with pytest.raises(ConfigurationError, match="iterated elsewhere"):
        list(zip(table, table))
    again = loader(there)
    rows_of(again)
    assert take(1, again) == [first], "the second iterator began the next epoch"


def test_another_snapshot_or_batch_cannot_be_continued(there, tmp_path):
    state = loader(there).state_dict()
    other = columns()
    other["y"] = other["y"] + 1
    with pytest.raises(ConfigurationError, match=r"another snapshot .*Leave the loader out of load_checkpoint"):
        loader(write(tmp_path / "other", pa.table(other))).load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"global_batch_size 48, but this loader has 96: pass 48"):
        loader(there, global_batch_size=96).load_state_dict(state)
    same = write(tmp_path / "same")
    loader(same).load_state_dict(state)  # the same rows, written again


def test_arguments_are_checked(there):
    with pytest.raises(ConfigurationError, match="either batch_size= or global_batch_size="):
        loader(there, batch_size=3)
    with pytest.raises(ConfigurationError, match=r"1000 rows, too few for one global batch of 1200 .*drop_last=False"):
        loader(there, global_batch_size=1200)
    with pytest.raises(ConfigurationError, match="5 ranks"):
        loader(there, 0, 5)
    with pytest.raises(ConfigurationError, match="global_batch_size= must be a whole number, not 48.0"):
        loader(there, global_batch_size=48.0)


def test_numbers_of_numpy_are_arguments_as_others(there):
    plain = loader(there, global_batch_size=None, batch_size=48, seed=3)
    numpy = loader(there, global_batch_size=None, batch_size=np.int64(48), seed=np.int32(3))
    assert rows_of(numpy) == rows_of(plain)
    assert type(numpy.state_dict()["seed"]) is int


def test_functions_decode_batches_in_order(there):
    def doubled(batch):
        return {"y": batch["y"] * 2}

    plain = [row * 2 for batch in rows_of(loader(there)) for row in batch]
    assert [row for batch in rows_of(loader(there, map=doubled)) for row in batch] == plain
    with pytest.raises(ZeroDivisionError):
        list(loader(there, map=lambda batch: 1 / 0))


def test_each_type_becomes_its_tensor_or_list(tmp_path):
    rows = 12
    when = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "bool": [row % 2 == 0 for row in range(rows)],
            "tiny": pa.array(range(rows), pa.int8()),
            "double": [row / 2 for row in range(rows)],
            "decimal": [decimal.Decimal(row) / 4 for row in range(rows)],
            "date": [datetime.date(1970, 1, 1 + row) for row in range(rows)],
            "time": [when + datetime.timedelta(seconds=row) for row in range(rows)],
            "text": [f"é{row}" for row in range(rows)],
            "bytes": [bytes([row]) * row for row in range(rows)],
            "even": [[row, row + 1, row + 2] for row in range(rows)],
            "ragged": [list(range(row)) for row in range(rows)],
        }
    )
    dataset = write(tmp_path / "types", table, lanes=3, columns=None)
    (batch,) = loader(dataset, global_batch_size=12, shuffle=False)
    del batch["_valid"]
    assert batch["bool"].dtype == torch.bool and batch["bool"].tolist()[:2] == [True, False]
    assert batch["tiny"].dtype == torch.int8
    assert batch["double"].tolist()[3] == 1.5
    assert batch["decimal"].dtype == torch.float64 and batch["decimal"].tolist()[1] == 0.25
    assert batch["date"].dtype == torch.int32 and batch["date"].tolist() == list(range(rows))
    assert batch["time"].tolist()[1] == (when.timestamp() + 1) * 1_000_000
    assert batch["text"] == [f"é{row}" for row in range(rows)]
    assert batch["bytes"] == [bytes([row]) * row for row in range(rows)]
    assert batch["even"].tolist()[4] == [4, 5, 6]
    values, offsets = batch["ragged"]
    assert [values[begin:end].tolist() for begin, end in itertools.pairwise(offsets)] == [
        list(range(row)) for row in range(rows)
    ]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_table_is_delivered_as_it_was_written(data):
    deliver_any_table(data)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None)
@given(data=st.data())
def test_many_tables_are_delivered_as_they_were_written(data):
    deliver_any_table(data)


class Table(NamedTuple):
    """A table with nulls, and what ranks must get of it: ``row`` of each row that is not dropped."""

    written: pa.Table
    nulls: Any
    rows: dict[int, dict[str, Any]]


@st.composite
def tables(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 150))
    nulls = draw(st.sampled_from(["error", "drop", "fill", "mask", {"n": 3, "t": "-"}]))
    kind = draw(st.sampled_from([pa.int8(), pa.int64(), pa.float32(), pa.float64()]))
    missing = random.random((2, count)) < (0 if nulls == "error" else draw(st.sampled_from([0, 0.1, 0.9])))
    numbers = [None if gone else each for each, gone in zip(random.integers(-100, 100, count).tolist(), missing[0])]
    texts = [None if gone else f"é{row}" for row, gone in enumerate(missing[1])]
    lists = [list(range(row, row + length)) for row, length in enumerate(random.integers(0, 4, count).tolist())]
    fields = {
        "y": np.arange(count),
        "n": pa.array(numbers, kind),
        "t": pa.array(texts, pa.string()),
        "l": pa.array(lists, pa.list_(pa.int64())),
    }
    table = pa.table(fields)
    batches = table.to_batches(draw(st.integers(1, 60)))
    for at in draw(st.lists(st.integers(0, len(batches)), max_size=3)):
        batches.insert(at, batches[0].slice(0, 0))
    fills = nulls if isinstance(nulls, dict) else {"n": 0, "t": ""}
    rows = {}
    for row, (number, text) in enumerate(zip(numbers, texts)):
        if nulls == "drop" and (number is None or text is None):
            continue
        rows[row] = {"n": fills["n"] if number is None else number, "t": fills["t"] if text is None else text}
        rows[row]["l"] = lists[row]
        if nulls == "mask":
            rows[row] |= {"n_mask": number is not None, "t_mask": text is not None}
    return Table(pa.Table.from_batches(batches, table.schema), nulls, rows)


def by_row(batch):
    """The rows of a batch, each with its number and whether it is valid."""
    lists = batch["l"]
    if isinstance(lists, tuple):
        values, offsets = lists
        lists = [values[begin:end] for begin, end in itertools.pairwise(offsets)]
    masks = batch.keys() & {"n_mask", "t_mask"}
    valid = batch.get("_valid", torch.ones(len(batch["y"]), dtype=torch.bool)).tolist()
    for at, number in enumerate(batch["y"].tolist()):
        row = {"n": batch["n"][at].item(), "t": batch["t"][at], "l": lists[at].tolist()}
        yield number, valid[at], row | {name: batch[name][at].item() for name in masks}


def deliver_any_table(data):
    table = data.draw(tables())
    lanes, per_lane = data.draw(st.sampled_from([1, 2, 4, 12])), data.draw(st.integers(1, 4))
    widths = st.sampled_from([each for each in (1, 2, 3, 4, 6, 12) if lanes % each == 0])
    drop_last = data.draw(st.booleans()) and len(table.rows) >= lanes * per_lane
    options = {"global_batch_size": lanes * per_lane, "drop_last": drop_last}
    options |= {"shuffle": data.draw(st.booleans()), "seed": data.draw(st.integers(0, 9))}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(row_order, "WINDOW_BYTES", data.draw(st.sampled_from([1, 3000, 64 << 20])))
        patch.setattr(row_order, "UNIT_BYTES", data.draw(st.sampled_from([1, 500, row_order.UNIT_BYTES])))
        if not table.rows:
            with pytest.raises(ConfigurationError, match="no rows"):
                write(folder, table.written, lanes, nulls=table.nulls)
            return
        dataset = write(folder, table.written, lanes, nulls=table.nulls)

        def deliver(width, state=None):
            """The global batches of what is left of an epoch, as rows."""
            ranks = []
            for rank in range(width):
                each = loader(dataset, rank, width, **options)
                if state is not None:
                    each.load_state_dict(state)
                ranks.append([list(by_row(batch)) for batch in each])
            return [functools.reduce(operator.iadd, parts, []) for parts in zip(*ranks, strict=True)]

        whole = deliver(data.draw(widths))
        first = loader(dataset, 0, data.draw(widths), **options)
        batches, step = iter(first), data.draw(st.integers(0, len(first) - 1))
        for _ in range(step):
            next(batches)
        assert deliver(data.draw(widths), first.state_dict()) == whole[step:]
    seen = [number for batch in whole for number, valid, _ in batch if valid]
    assert all(row == table.rows[number] for batch in whole for number, _, row in batch)
    assert {len(batch) for batch in whole} == {lanes * per_lane}
    assert len(set(seen)) == len(seen)
    assert len(table.rows) - len(seen) < (lanes * per_lane + lanes if drop_last else 1)


def test_a_small_table_has_small_windows(there):
    """The order of a window's rows is computed for as many as it may have."""
    table = loader(there)
    assert len(table) == ROWS // 48
    assert table.state_dict()["window"] == ROWS // 48 * 48


def file_of(dataset):
    (path,) = [os.path.join(at, name) for at, _, names in os.walk(dataset.folder) for name in names if ".arrow" in name]
    return path


def test_a_file_that_was_cut_short_is_named(tmp_path):
    dataset = write(tmp_path / "cut")
    os.truncate(file_of(dataset), os.path.getsize(file_of(dataset)) // 2)
    with pytest.raises(DataError, match=r"\.arrow of the data .*(cut short|other checksum)"):
        list(loader(dataset))


def test_a_changed_byte_is_noticed_in_the_first_epoch(tmp_path):
    dataset = write(tmp_path / "changed")
    place = RankDataset.open(dataset, 0, 1).manifest.parts[0].places[0]
    with open(file_of(dataset), "r+b") as file:
        file.seek(place + 5)
        byte = file.read(1)
        file.seek(place + 5)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DataError, match="block 0 has another checksum"):
        list(loader(dataset))


def test_a_snapshot_that_was_removed_is_named(tmp_path):
    dataset = write(tmp_path / "gone")
    table = RankDataset.open(dataset, 0, 1)
    os.remove(file_of(dataset))
    with pytest.raises(DataError, match=r"\.arrow of the data cannot be read: No such file"):
        list(table.loader(global_batch_size=12))
    with pytest.raises(DataError, match="cannot be read on this node: No such file"):
        RankDataset.open(Dataset(str(tmp_path / "none"), 12), 0, 1)


def test_another_snapshot_in_the_folder_of_a_node_is_refused(there, tmp_path):
    same, other = write(tmp_path / "same"), write(tmp_path / "other", pa.table(columns(999)))
    began = RankDataset.open(there, 0, 1).manifest.id
    assert len(RankDataset.open(replace(same, snapshot=began), 0, 1)) == ROWS
    with pytest.raises(DataError, match=rf"other has another snapshot .* \({began}\)\. It must be"):
        RankDataset.open(replace(other, snapshot=began), 0, 1)


def test_tensors_come_on_the_device(there):
    batch = next(iter(loader(there).tensors_on("meta")))
    assert batch["x"].device.type == "meta"


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("made", "tensors"),
    [
        (lambda batch: batch["x"], lambda batch: [batch]),
        (lambda batch: (batch["x"], batch["y"]), list),
        (lambda batch: Pair(batch["x"], batch["y"]), lambda batch: [batch.x, batch.y]),
        (lambda batch: ["a text", batch["x"]], lambda batch: batch[1:]),
        (lambda batch: [{"in": [batch["x"]]}], lambda batch: batch[0]["in"]),
    ],
)
def test_tensors_of_what_a_function_makes_come_on_the_device(there, made, tensors):
    batch = next(iter(loader(there, map=made).tensors_on("meta")))
    assert type(batch) is type(made({"x": torch.ones(1), "y": None}))
    assert {each.device.type for each in tensors(batch)} == {"meta"}


def test_a_buffer_is_used_until_the_copy_on_its_own_gpu_has_ended(monkeypatch):
    """The current GPU may be another one."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    deliver, pinned, used = _Deliver(torch.device("cuda:1")), Mock(), Mock()
    monkeypatch.setattr(deliver, "_slot", lambda *_: (pinned, used))
    deliver({"x": torch.ones(2)})
    used.record.assert_called_once_with(("stream of", torch.device("cuda:1")))
