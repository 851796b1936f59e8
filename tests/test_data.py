"""A DataFrame in whole runs: written once, trained on by any number of ranks, and continued after a kill."""

from __future__ import annotations

import glob
import importlib.util
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import watch
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions

from distributor import (
    Checkpoints,
    ConfigurationError,
    Data,
    Distributor,
    ResourceError,
    RunCancelledError,
    runtime,
    snapshot,
)
from distributor.data import feeding, spark_frames

pytestmark = pytest.mark.spark

ROWS = 2_000


def table(session: Any, rows: int = ROWS) -> Any:
    number = functions.col("id")
    return session.range(rows, numPartitions=3).select(
        number.alias("y"), number.cast("float").alias("x1"), (-number).cast("double").alias("x2")
    )


def points(session: Any, **options: Any) -> Data:
    return Data(table(session), **{"pack": {"x": ["x1", "x2"]}, "label": "y", "dtypes": {"x": "float32"}, **options})


def seen(epochs: int = 1, **options: Any) -> list[list[int]]:
    loader = runtime.dataset("train").loader(**{"global_batch_size": 96, "shuffle": True, **options})
    found = []
    for _ in loader.epochs(epochs):
        for batch in loader:
            assert batch["x"].tolist() == [[y, -y] for y in batch["y"].tolist()]
            found.append(batch["y"].tolist())
    return found


def together(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The global batches of which ranks have seen parts."""
    return [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


def left() -> list[str]:
    """Snapshots in the temporary directory."""
    return glob.glob(f"{tempfile.gettempdir()}/distributor-*/*/snapshot.json")


def distributor(data: Any, ranks: Any = 2, **options: Any) -> Distributor:
    return Distributor(ranks, **{"local_mode": True, "use_gpu": False, "data": {"train": data}, **options})


def test_a_frame_is_shared_by_two_ranks_and_nothing_is_left(one_jvm: Any) -> None:
    before = left()
    first, second = distributor(points(one_jvm)).submit(seen).results()
    assert len(first) == len(second) == ROWS // 96
    rows = [row for batch in first + second for row in batch]
    assert len(set(rows)) == len(rows)
    assert left() == before


def test_one_partition_feeds_two_ranks(one_jvm: Any) -> None:
    """PySpark's _train_on_dataframe waits for ever here."""
    data = Data(table(one_jvm).coalesce(1), pack={"x": ["x1", "x2"]}, label="y", dtypes={"x": "float32"})
    assert [len(found) for found in distributor(data).submit(seen).results()] == [20, 20]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["{}", pytest.param("file://{}", marks=pytest.mark.long)])
def test_executors_read_a_snapshot_in_a_shared_folder(two_executors: Any, tmp_path: Path, where: str) -> None:
    data = snapshot(points(two_executors), where.format(tmp_path / "points"))
    first, second = distributor(data, local_mode=False).submit(seen).results()
    local = distributor(Data(str(tmp_path / "points")), ranks=1).run(seen)
    assert [one + two for one, two in zip(first, second, strict=True)] == local


@pytest.mark.slow
def test_vectors_arrays_and_texts_come_from_spark(one_jvm: Any) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([i, i + 1]) if i % 2 else Vectors.sparse(2, {1: i}), [i] * 3, f"t{i}") for i in range(50)]
    frame = one_jvm.createDataFrame(rows, ["features", "triple", "text"])

    def train() -> Any:
        (batch,) = runtime.dataset("train").loader(batch_size=96)
        return {name: getattr(value, "dtype", None) for name, value in batch.items()}, [
            (each.tolist() if hasattr(each, "tolist") else each) for each in (batch["features"][1], batch["text"][3])
        ]

    types, values = distributor(Data(frame), ranks=1).run(train)
    assert {name: str(kind) for name, kind in types.items()} == {
        "features": "torch.float32", "triple": "torch.int64", "text": "None", "_valid": "torch.bool"
    }  # fmt: skip
    assert values == [[1.0, 2.0], "t3"]


@pytest.mark.slow
def test_a_vector_that_is_null_is_a_null_as_others(one_jvm: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.types import LongType, StructField, StructType

    kinds = StructType([StructField("id", LongType()), StructField("v", VectorUDT())])
    frame = one_jvm.createDataFrame([(1, Vectors.dense([1.0, 2.0])), (2, None), (3, None)], kinds)
    with pytest.raises(ConfigurationError, match=r"nulls in 'v' \(2\):"):
        snapshot(Data(frame), tmp_path / "refused")
    dropped = snapshot(Data(frame, nulls="drop", lanes=1), tmp_path / "dropped")

    def train() -> Any:
        (batch,) = runtime.dataset("train").loader(batch_size=1)
        return batch["id"].tolist(), batch["v"].tolist()

    assert distributor(dropped, ranks=1).run(train) == ([1], [[1.0, 2.0]])


def interrupted(folder: str) -> list[list[int]]:
    loader = runtime.dataset("train").loader(global_batch_size=96, shuffle=True, seed=3)
    runtime.load_checkpoint({"data": loader})
    found, step = [], 0
    for _ in loader.epochs(2):
        for batch in loader:
            found.append(batch["y"].tolist())
            step = loader.epoch * len(loader) + len(found)
            runtime.save_checkpoint({"data": loader}, step, wait=True)
            if len(found) == 7 and runtime.attempt() == 0:
                Path(folder, f"seen-{runtime.rank()}").write_text(repr(found))
                runtime.save_checkpoint({"data": loader}, step + 1, wait=True)
                os.kill(os.getpid(), signal.SIGKILL)
    return found


@pytest.mark.slow
def test_columns_may_have_any_names(one_jvm: Any) -> None:
    number = functions.col("id")
    frame = one_jvm.range(96).select(number.alias("a.b"), number.cast("float").alias("odd `name`"))

    def train() -> Any:
        (batch,) = runtime.dataset("train").loader(global_batch_size=96)
        return {name: sum(values.tolist()) for name, values in batch.items()}

    assert distributor(Data(frame), 1).run(train) == {"a.b": 4560, "odd `name`": 4560.0, "_valid": 96}


@pytest.mark.parametrize("width", [2, pytest.param((1, 3), marks=pytest.mark.long)])
@pytest.mark.slow
def test_killed_ranks_continue_with_the_rows_that_come_next(one_jvm: Any, tmp_path: Path, width: Any) -> None:
    data = points(one_jvm, lanes=12)
    run = distributor(data, width, checkpoints=str(tmp_path / "saved"), max_restarts=1)
    rests = run.submit(interrupted, str(tmp_path)).results()
    ranks = [eval(path.read_text()) for path in sorted(tmp_path.glob("seen-*"))]
    got = together(ranks) + together(rests)
    whole = distributor(data, 1).run(seen, epochs=2, seed=3)
    assert got == whole
    (kept,) = (tmp_path / "saved").glob("data-train-*")
    assert (kept / "snapshot.json").exists()


@pytest.mark.parametrize("where", ["{}", pytest.param("file://{}", marks=pytest.mark.long)])
@pytest.mark.slow
def test_the_next_run_in_the_folder_has_the_same_snapshot(one_jvm: Any, tmp_path: Path, where: str) -> None:
    def train(most: int) -> list[int]:
        loader = runtime.dataset("train").loader(global_batch_size=96, shuffle=True)
        runtime.load_checkpoint({"data": loader})
        found = []
        for batch in loader:
            found += batch["y"].tolist()
            if len(found) >= most:
                runtime.save_checkpoint({"data": loader}, 1, wait=True)
                break
        return found

    options = {"ranks": 1, "checkpoints": where.format(tmp_path / "saved")}
    first = distributor(points(one_jvm), **options).run(train, 5 * 96)
    rest = distributor(points(one_jvm), **options).run(train, ROWS)
    assert len(set(first + rest)) == len(first) + len(rest) == 20 * 96
    assert len(list((tmp_path / "saved").glob("data-train-*"))) == 1
    changed = Data(table(one_jvm, 1_500), pack={"x": ["x1", "x2"]}, label="y", dtypes={"x": "float32"})
    with pytest.raises(Exception, match=r"another snapshot .*Leave the loader out"):
        distributor(changed, **options).run(train, ROWS)


@pytest.mark.slow
def test_a_snapshot_without_a_checkpoint_is_not_kept(one_jvm: Any, tmp_path: Path) -> None:
    distributor(points(one_jvm), checkpoints=str(tmp_path / "saved")).run(seen)
    assert list((tmp_path / "saved").glob("data-*")) == []


@pytest.mark.slow
def test_columns_of_one_type_come_from_spark_with_their_nulls(one_jvm: Any, tmp_path: Path) -> None:
    holes = functions.expr("if(id % 10 = 3, null, cast(id as float))")
    frame = one_jvm.range(100, numPartitions=2).select(
        "id", functions.col("id").cast("float").alias("a"), holes.alias("b")
    )
    with pytest.raises(ConfigurationError, match=r"nulls in 'b' \(10\):"):
        snapshot(Data(frame, pack={"x": ["a", "b"]}, label="id"), tmp_path / "refused")

    def train() -> Any:
        loader = runtime.dataset("train").loader(batch_size=90)
        return [(y, x) for batch in loader for y, x in zip(batch["id"].tolist(), batch["x"].tolist())]

    data = Data(frame, pack={"x": ["a", "b"]}, label="id", nulls="drop", lanes=1)
    assert sorted(distributor(data, ranks=1).run(train)) == [(i, [i, i]) for i in range(100) if i % 10 != 3]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda session: table(session).withColumn("y", functions.expr("if(y % 2 = 0, null, y)")), r"'y' \(1000\)"),
        (lambda session: table(session).withColumn("y", functions.struct("y")), "'y' is struct.*no tensor"),
        (lambda session: session.readStream.format("rate").load(), "streaming DataFrame has no end"),
        (lambda session: table(session).where("y < 0"), "no rows"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_ranks_start(one_jvm: Any, make: Any, words: str) -> None:
    before = left()
    with pytest.raises(ConfigurationError, match=words):
        distributor(make(one_jvm)).run(seen)
    assert left() == before


def test_executors_need_a_folder_that_they_see(one_jvm: Any, tmp_path: Path) -> None:
    data = {"train": points(one_jvm)}
    with pytest.raises(ConfigurationError, match=r"data 'train' needs a folder .*snapshot\(df, '/shared/train'\)"):
        feeding.check(data, None, one_machine=False)
    feeding.check(data, Checkpoints(str(tmp_path)), one_machine=False)


@pytest.mark.slow
def test_a_snapshot_tells_whether_its_files_have_changed(one_jvm: Any, tmp_path: Path) -> None:
    def read() -> Any:
        return one_jvm.read.parquet(str(tmp_path / "source"))

    table(one_jvm).write.parquet(str(tmp_path / "source"))
    snapshot(read(), tmp_path / "kept")
    made = (tmp_path / "kept" / "snapshot.json").stat().st_mtime_ns
    snapshot(read(), tmp_path / "kept")
    assert (tmp_path / "kept" / "snapshot.json").stat().st_mtime_ns == made
    table(one_jvm).write.mode("append").parquet(str(tmp_path / "source"))
    with pytest.raises(ConfigurationError, match="a snapshot of another source"):
        snapshot(read(), tmp_path / "kept")


def read_as_v2(frame: Any) -> Any:
    name = "spark.sql.sources.useV1SourceList"
    session, path = frame.sparkSession, frame.inputFiles()[0]
    before = session.conf.get(name)
    session.conf.set(name, "")
    try:
        return session.read.parquet(path)
    finally:
        session.conf.set(name, before)


SHOWN = {
    "files": lambda frame: frame,
    "sum": lambda frame: frame.groupBy("id").sum("x").select(functions.col("sum(x)") * 2),
    "many expressions": lambda frame: frame.select([frame.x + number for number in range(30)]),
    "many values": lambda frame: frame.where(frame.id.isin(*range(30))),
    "other values": lambda frame: frame.where(frame.id.isin(*range(29), 40)),
}
HIDDEN = {
    "udf": lambda frame: frame.select(functions.udf(float)("x")),
    "udf in a filter": lambda frame: frame.where(functions.udf(float)(frame["x"] + 1) > "1"),
    "udf behind others": lambda frame: frame.select(*["x"] * 30, functions.udf(float)("x")),
    "arrow": lambda frame: frame.mapInArrow(lambda batches: batches, "id bigint, x double"),
    "pandas": lambda frame: frame.mapInPandas(lambda batches: batches, "id bigint, x double"),
    "groups": lambda frame: frame.groupBy("id").applyInPandas(lambda group: group, "id bigint, x double"),
    "Spark ML": lambda frame: VectorAssembler(inputCols=["x"], outputCol="v").transform(frame),
    "v2": read_as_v2,
    "csv": lambda frame: read_text(frame, "csv"),
    "csv in a join": lambda frame: frame.join(read_text(frame, "csv").withColumnRenamed("id", "other")),
    "json": lambda frame: read_text(frame, "json"),
    "text": lambda frame: read_text(frame, "text"),
    "today": lambda frame: frame.where("current_date() > date'2020-01-01'"),
    "now": lambda frame: frame.withColumn("now", functions.current_timestamp()),
    "now, as a number": lambda frame: frame.selectExpr("unix_timestamp() AS now"),
    "random": lambda frame: frame.where(functions.rand() < 0.5),
    "random order": lambda frame: frame.orderBy(functions.rand(1)),
    "uuid": lambda frame: frame.selectExpr("uuid() AS name"),
    "subquery": lambda frame: frame.where(f"id > (SELECT max(id) - 1 FROM parquet.`{frame.inputFiles()[0]}`)"),
    "exists": lambda frame: frame.where(f"EXISTS (SELECT 1 FROM parquet.`{frame.inputFiles()[0]}`)"),
    "in": lambda frame: frame.where(f"id IN (SELECT id FROM parquet.`{frame.inputFiles()[0]}`)"),
}
BOTH = {
    "columns of a join": lambda frame: [joined(frame).select(f"{side}.x") for side in "lr"],
    "filters of a join": lambda frame: [joined(frame).where(f"l.x {sign} r.x").select("id") for sign in "<>"],
    "texts": lambda frame: [frame.where(functions.concat(functions.lit("#"), "id") == text) for text in ("#1", "#2")],
    "names": lambda frame: [frame.withColumn("name", functions.lit(text)) for text in ("Brand#12", "Brand#34")],
    "numbers and texts": lambda frame: [frame.withColumn("one", functions.lit(one)) for one in (1, "1")],
    "lengths": lambda frame: [frame.selectExpr(f"length({one}) AS one") for one in ("'1'", "X'31'")],
}
ALIKE = {
    "odd names": lambda frame: frame.toDF(*(f"{name} ?#1" for name in frame.columns)),
    "bytes": lambda frame: frame.selectExpr("X'FF00' AS bytes", "'Brand#12' AS name"),
    "join": lambda frame: joined(frame).where("l.x > r.x").select("id"),
    "view": lambda frame: in_a_view(frame, "WITH a AS (SELECT * FROM it) SELECT a.*, b.x y FROM a JOIN a b USING (id)"),
}


def in_a_view(frame: Any, query: str) -> Any:
    frame.createOrReplaceTempView("it")
    return frame.sparkSession.sql(query)


def read_text(frame: Any, kind: str) -> Any:
    place = f"{os.path.dirname(frame.inputFiles()[0])}/{kind}"
    frame.selectExpr("CAST(id AS string) AS id").write.mode("overwrite").format(kind).save(place)
    return frame.sparkSession.read.schema("id string").format(kind).load(place)


def joined(frame: Any) -> Any:
    other = frame.sparkSession.read.parquet(os.path.dirname(frame.inputFiles()[0]))
    return frame.alias("l").join(other.alias("r"), "id")


@pytest.mark.slow
def test_a_plan_tells_rows_apart_or_says_nothing(one_jvm: Any, tmp_path: Path) -> None:
    number = functions.col("id")
    wide = one_jvm.range(3).select("id", number.cast("double").alias("x"), *(number.alias(f"c{i}") for i in range(30)))
    wide.write.parquet(f"{tmp_path}/it")
    frame = one_jvm.read.parquet(f"{tmp_path}/it")
    before = one_jvm.conf.get("spark.sql.debug.maxToStringFields")
    shown = {name: spark_frames.plan_of(make(frame)) for name, make in SHOWN.items()}
    assert len({*shown.values(), ""}) == len(shown) + 1, shown
    assert shown == {name: spark_frames.plan_of(make(frame)) for name, make in SHOWN.items()}
    assert {name: spark_frames.plan_of(make(frame)) for name, make in HIDDEN.items()} == dict.fromkeys(HIDDEN, "")
    assert one_jvm.conf.get("spark.sql.debug.maxToStringFields") == before


@pytest.mark.slow
def test_other_queries_have_other_plans_and_the_same_query_has_the_same(one_jvm: Any, tmp_path: Path) -> None:
    one_jvm.range(3).selectExpr("id", "CAST(id AS double) AS x", "CAST(id AS string) AS t").write.parquet(
        f"{tmp_path}/it"
    )
    other = one_jvm.newSession()
    other.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    frames = [session.read.parquet(f"{tmp_path}/it") for session in (one_jvm, one_jvm.newSession(), other)]
    for name, make in BOTH.items():
        plans = [spark_frames.plan_of(each) for frame in frames[:2] for each in make(frame)]
        assert plans[:2] == plans[2:], name
        assert len({*plans, ""}) == 3, name
    for name, make in ALIKE.items():
        one, again, zone = (spark_frames.plan_of(make(frame)) for frame in frames)
        assert one == again != "", name
        assert zone not in (one, ""), name


def test_the_number_of_ranks_must_divide_the_lanes(one_jvm: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"num_processes=5: data 'train': 48 lanes .* 5 ranks"):
        distributor(points(one_jvm), ranks=5)
    assert distributor(points(one_jvm), ranks=(5, 7)).num_processes == 6


def test_data_that_a_run_lacks_are_named(one_jvm: Any) -> None:
    with pytest.raises(Exception, match=r"no data 'val': this run has 'train'\. Pass Distributor\(data="):
        distributor(points(one_jvm), ranks=1).run(lambda: runtime.dataset("val"))
    with pytest.raises(ConfigurationError, match="no data 'val': this process has none"):
        runtime.dataset("val")


@pytest.mark.slow
def test_a_run_is_cancelled_while_its_data_is_written(one_jvm: Any, tmp_path: Path) -> None:
    began = tmp_path / "began"

    @functions.udf("bigint")
    def slow(value: int) -> int:
        began.touch()
        threading.Event().wait(60)
        return value

    data = Data(table(one_jvm).withColumn("y", slow("y")), pack={"x": ["x1", "x2"]}, label="y")
    before = left()
    run = distributor(data).submit(seen)
    watch.until(began.exists)
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.result()
    assert left() == before


@pytest.mark.long
def test_waiting_for_data_is_part_of_the_goodput(one_jvm: Any) -> None:
    def slow() -> None:
        def wait(batch: Any) -> Any:
            threading.Event().wait(0.1)
            return batch

        for step, _ in enumerate(runtime.dataset("train").loader(batch_size=96, map=wait, map_threads=1)):
            runtime.report(step=step)

    run = distributor(points(one_jvm), ranks=1).submit(slow)
    run.result()
    _, *waits = [row.values["data_wait"] for row in run.metrics]  # the first is part of the start
    assert 0.5 < sum(waits) <= run.goodput.data + 0.1


@pytest.mark.slow
def test_the_example_scores_the_held_out_part(two_executors: Any, tmp_path: Path) -> None:
    path = Path(__file__).parent.parent / "examples" / "tabular.py"
    spec = importlib.util.spec_from_file_location("tabular", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["tabular"] = example
    spec.loader.exec_module(example)
    score = example.main(str(tmp_path))
    assert score["rows"] == 143
    assert score["accuracy"] > 0.9


@pytest.mark.ci
@pytest.mark.slow
def test_an_executor_that_is_killed_while_it_writes_costs_no_row(two_executors: Any, tmp_path: Path) -> None:
    marker = tmp_path / "killed"

    @functions.udf("bigint")
    def deadly(value: int) -> int:
        if value == ROWS // 2:
            try:
                marker.touch(exist_ok=False)
            except FileExistsError:
                return value
            java = next(each for each in psutil.Process().parents() if "java" in each.name())
            os.kill(java.pid, signal.SIGKILL)
        return value

    frame = table(two_executors).withColumn("y", deadly("y"))
    snapshot(Data(frame, pack={"x": ["x1", "x2"]}, label="y", dtypes={"x": "float32"}), tmp_path / "points")
    assert marker.exists()
    files = [path.name for path in tmp_path.glob("points/*/*.arrow")]
    assert len(files) == 3, "what the killed task has left stays"
    data = Data(str(tmp_path / "points"))
    assert {y for batch in distributor(data, 1).run(seen, shuffle=False) for y in batch} == set(range(ROWS))


@pytest.mark.slow
def test_an_executor_whose_disk_is_full_says_so(two_executors: Any, full_disk: Path) -> None:
    with pytest.raises(ResourceError, match=r"the data cannot be written: No space left on device .*disk"):
        snapshot(table(two_executors, 200_000), full_disk / "points")
    assert list(full_disk.iterdir()) == []


@pytest.mark.slow
def test_a_node_with_another_snapshot_in_the_folder_trains_on_none_of_its_rows(one_jvm: Any, tmp_path: Path) -> None:
    data = snapshot(points(one_jvm), tmp_path / "points")
    snapshot(table(one_jvm, 1_900), tmp_path / "other")

    def train(there: str, other: str) -> Any:
        shutil.copytree(other, there, dirs_exist_ok=True)
        return seen()

    with pytest.raises(Exception, match=rf"the folder {tmp_path}/points has another snapshot on this node"):
        distributor(data, 1).run(train, str(tmp_path / "points"), str(tmp_path / "other"))


@pytest.mark.long
def test_a_snapshot_that_is_removed_during_the_run_is_named(one_jvm: Any, tmp_path: Path) -> None:
    data = snapshot(points(one_jvm), tmp_path / "points")

    def train(folder: str) -> None:
        loader = runtime.dataset("train").loader(global_batch_size=96, shuffle=True)
        for _ in loader.epochs(2):
            for _ in loader:
                pass
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(Exception, match=rf"the file {tmp_path}/points/.*\.arrow of the data cannot be read: No such"):
        distributor(data, 1).run(train, str(tmp_path / "points"))
