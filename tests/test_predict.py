"""A DataFrame scored by a model: one row for each row, whatever is killed, and nothing left behind."""

from __future__ import annotations

import glob
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import watch
from pyspark.sql import functions
from sessions import Sessions, two_gpus
from torch import nn

from distributor import ConfigurationError, Distributor, predict, release, runtime
from distributor.machine import bootstrap, processes
from distributor.machine.folders import remove_stale
from distributor.values.environment import CHECK_GPUS

pytestmark = pytest.mark.spark

ROWS = 3_000

SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed < 3 else pytest.mark.long) for seed in range(50)]


def table(session: Any, rows: int = ROWS) -> Any:
    number = functions.col("id")
    return session.range(rows, numPartitions=4).select(
        "id", number.cast("float").alias("a"), (-2 * number).cast("float").alias("b")
    )


def is_mine(process: psutil.Process) -> bool:
    """Whether tests of this process have started it: others run beside."""
    return bool((process.info["environ"] or {}).get("TMPDIR") == tempfile.gettempdir())


def servers() -> list[psutil.Process]:
    """This session's processes that have loaded a model; those that they forked are their children."""
    found = []
    for process in psutil.process_iter(["environ", "ppid"]):
        if is_mine(process) and bootstrap.is_part(process.pid, "model"):
            found.append(process)
    pids = {each.pid for each in found}
    return [each for each in found if each.info["ppid"] not in pids]


def folders() -> list[str]:
    return glob.glob(f"{tempfile.gettempdir()}/distributor-model-*")


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    yield

    def gone() -> bool:
        for server in servers():  # one may have begun to load a moment ago
            with suppress(psutil.NoSuchProcess):
                server.send_signal(signal.SIGTERM)
        remove_stale()
        return not servers() and not folders()

    try:
        watch.until(gone)
    except AssertionError:
        left = [*servers(), *((folder, os.listdir(folder)) for folder in folders())]
        for server in servers():  # the next tests are not at fault
            server.kill()
        for folder in folders():
            shutil.rmtree(folder)
        raise AssertionError(f"left behind: {left}") from None


def sums() -> Any:
    return lambda batch: batch["x"].sum(1)


def held(begun: str, go: str) -> Any:
    """A loader of :func:`sums`, which says that it computes, and waits for a file."""

    def score(batch: dict[str, Any]) -> Any:
        Path(begun).touch()
        while not os.path.exists(go):
            threading.Event().wait(0.05)
        return batch["x"].sum(1)

    return lambda: score


INPUT = {"x": ["a", "b"]}
OUTPUT = "total float, both array<float>, one array<float>, name string"


def test_each_row_gets_its_output_and_the_model_is_loaded_once(one_jvm: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def load() -> Any:
        Path(folder, str(os.getpid())).touch()
        return lambda batch: {
            "total": batch["x"].sum(1, keepdim=True),
            "both": batch["x"],
            "one": batch["x"][:, :1],
            "name": [f"n{i}" for i in batch["n"][:, 0]],
        }

    frame = table(one_jvm)
    scored = predict(load, frame, input={**INPUT, "n": "id"}, output=OUTPUT, keep=["id"])
    assert scored.columns == ["id", "total", "both", "one", "name"]
    rows = sorted(scored.collect())
    assert [row.id for row in rows] == list(range(ROWS))
    assert all(
        (row.total, row.both, row.one, row.name) == (-row.id, [row.id, -2 * row.id], [row.id], f"n{row.id}")
        for row in rows
    )
    assert predict(load, frame, input={**INPUT, "n": "id"}, output="total float").where("total > 0").count() == 0
    assert len(list(tmp_path.iterdir())) == 1
    assert len(servers()) == 1
    assert len(servers()[0].children()) == 1 + len(os.sched_getaffinity(0)), (
        "the one that loaded the model, and those that compute, which share its pages"
    )


@pytest.mark.slow
def test_executors_load_a_checkpoint_of_a_training(two_executors: Any, tmp_path: Path) -> None:
    def train() -> None:
        torch.manual_seed(runtime.rank())
        runtime.save_checkpoint({"model": nn.Linear(2, 1)}, 1, wait=True)

    def expected(row: Any) -> float:
        module = nn.Linear(2, 1)
        runtime.load_checkpoint({"model": module}, folder=tmp_path)
        return module(torch.tensor([[row.a, row.b]])).item()

    Distributor(1, local_mode=True, use_gpu=False, checkpoints=tmp_path).run(train)
    scored = predict(tmp_path, table(two_executors), model=lambda: nn.Linear(2, 1), input=INPUT, output="score float")
    rows = scored.collect()
    assert len(rows) == ROWS
    assert rows[7].score == pytest.approx(expected(rows[7]), rel=1e-5)
    assert len(servers()) == 2


@pytest.mark.slow
def test_texts_vectors_and_lists_are_inputs(one_jvm: Any) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(i, f"t{i}", Vectors.dense([i, i + 1]), [1.0] * (i % 3 + 1)) for i in range(50)]
    frame = one_jvm.createDataFrame(rows, ["id", "text", "vector", "list"])

    def load() -> Any:
        def score(batch: dict[str, Any]) -> Any:
            sizes = [len(each) for each in batch["list"]]
            return [f"{t} {v:g} {s}" for t, v, s in zip(batch["text"], batch["vector"].sum(1).tolist(), sizes)]

        return score

    scored = predict(
        load, frame, input={"text": "text", "vector": "vector", "list": "list"}, output="said string", keep="id"
    )
    assert {row.id: row.said for row in scored.collect()} == {i: f"t{i} {2 * i + 1} {i % 3 + 1}" for i in range(50)}


def picky() -> Any:
    def score(batch: dict[str, Any]) -> Any:
        if (batch["x"][:, 0] % 1000 == 77).any():
            raise ValueError("no such number")
        return batch["x"].sum(1)

    return score


def test_a_row_that_fails_is_named_with_its_inputs_and_the_users_line(one_jvm: Any) -> None:
    with pytest.raises(
        Exception,
        match=r"row 77 of partition 0 fails: ValueError: no such number \(.*test_predict.py, line \d+, in score\)"
        r".* a = 77.0, b = -154.0",
    ):
        predict(picky, table(one_jvm).coalesce(1), input=INPUT, output="total float").collect()


@pytest.mark.slow
def test_rows_that_fail_or_have_nulls_may_be_null(one_jvm: Any) -> None:
    frame = table(one_jvm).withColumn("b", functions.expr("if(id = 5, null, b)"))
    rows = predict(picky, frame, input=INPUT, output="total float", on_error="null").collect()
    failed = {row.id: row.error for row in rows if row.total is None}
    assert len(rows) == ROWS
    assert sorted(failed) == [5, 77, 1077, 2077]
    assert failed[5] == "column 'b' is null"
    assert "ValueError: no such number" in failed[77]
    assert all(row.total == -row.id and row.error is None for row in rows if row.id not in failed)
    with pytest.raises(Exception, match=r"row 5 of partition 0 fails: column 'b' is null"):
        predict(picky, frame.coalesce(1), input=INPUT, output="total float").collect()
    never = predict(picky, frame, input=INPUT, output="total float NOT NULL", on_error="null")
    assert never.where("total IS NULL").count() == 4


@pytest.mark.long
def test_a_text_that_is_not_utf_8_may_be_null(one_jvm: Any) -> None:
    texts = table(one_jvm, 10).selectExpr("id", "if(id = 5, cast(X'61FF' AS string), 'a') AS t")

    def load() -> Any:
        return lambda batch: [float(len(each)) for each in batch["t"]]

    rows = sorted(predict(load, texts, input={"t": "t"}, output="y float", keep=["id"], on_error="null").collect())
    assert [(row.id, row.error) for row in rows if row.y is None] == [
        (5, "column 't' is not UTF-8: invalid start byte at byte 1")
    ]
    with pytest.raises(Exception, match=r"row 5 of partition 0 fails: column 't' is not UTF-8"):
        predict(load, texts.coalesce(1), input={"t": "t"}, output="y float").collect()


@pytest.mark.slow
def test_a_vector_that_is_null_is_a_row_that_fails(one_jvm: Any) -> None:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.types import LongType, StructField, StructType

    kinds = StructType([StructField("id", LongType()), StructField("v", VectorUDT())])
    frame = one_jvm.createDataFrame([(1, Vectors.dense([1.0, 2.0])), (2, None)], kinds)

    def load() -> Any:
        return lambda batch: batch["v"].sum(1)

    rows = predict(load, frame, input={"v": "v"}, output="total float", keep=["id"], on_error="null").collect()
    assert sorted((row.id, row.total, row.error) for row in rows) == [(1, 3, None), (2, None, "column 'v' is null")]


def broken(kind: str) -> Any:
    def load() -> Any:
        if kind == "load":
            raise RuntimeError("no weights")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "nothing":
            return None
        wrong = {
            "short": lambda x: x[1:],
            "names": lambda x: {"other": x},
            "text": lambda x: ["a"] * len(x),
            "sparse": lambda x: x.to_sparse(),
            "functions": lambda x: [lambda: None] * len(x),
        }
        return lambda batch: wrong[kind](batch["x"][:, 0])

    return load


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("load", r"the model cannot be loaded: RuntimeError: no weights \(.*test_predict.py, line \d+, in load\)"),
        pytest.param(
            "killed", "3 times, the process that loads the model was killed by SIGKILL", marks=pytest.mark.long
        ),
        pytest.param("nothing", "must return a module or a function of a batch, not NoneType", marks=pytest.mark.long),
        pytest.param(
            "short",
            r"the output 'total' of \d+ rows is of shape \[\d+\]: the model must return one value for each row",
            marks=pytest.mark.long,
        ),
        pytest.param("names", r"the model returned \['other'\], without the output 'total'", marks=pytest.mark.long),
        pytest.param("text", "the output 'total' cannot become float", marks=pytest.mark.long),
        pytest.param("sparse", "the model's outputs cannot be sent: TypeError", marks=pytest.mark.long),
        pytest.param("functions", r"the model's outputs cannot be sent: .*pickle", marks=pytest.mark.long),
    ],
)
def test_a_model_that_is_wrong_is_one_sentence(one_jvm: Any, kind: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        predict(broken(kind), table(one_jvm, 10).coalesce(1), input=INPUT, output="total float").collect()


@pytest.mark.long
def test_a_loader_may_print(one_jvm: Any) -> None:
    def load() -> Any:
        print("loading weights")
        return sums()

    assert predict(load, table(one_jvm, 10), input=INPUT, output="total float").count() == 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input": {"x": ["a", "c"]}}, r"predict\(input=...\): there is no column 'c'"),
        ({"input": {}}, "input must be a dict"),
        ({"output": "score"}, "no list of names and types"),
        ({"output": "a float"}, "two columns 'a'"),
        ({"output": "A float"}, "two columns 'A'"),
        ({"output": "y float, Y float"}, "two columns 'y'"),
        ({"error_column": "ID", "on_error": "null"}, "two columns 'ID'"),
        ({"keep": ["z"]}, "no column 'z'"),
        ({"keep": ["a", "a"]}, "column 'a' is named twice"),
        ({"error_column": ""}, "error_column must be a column's name, not ''"),
        ({"on_error": "skip"}, "'raise' or 'null', not 'skip'"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"timeout": 0}, "timeout"),
        ({"num_gpus": -1}, "num_gpus must be an integer of at least 0, not -1"),
        ({"num_gpus": 1, "processes_per_node": 2}, "pass num_gpus or processes_per_node"),
        ({"map": "decode"}, "map must be a function of a dict of inputs, not 'decode'"),
        ({"source": "saved"}, "pass a function that loads the model, or the folder of checkpoints and model="),
        ({"source": "/nowhere", "model": nn.Identity}, "no checkpoint in '/nowhere'"),
        ({"df": [1]}, "a Spark DataFrame, not list"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(one_jvm: Any, options: dict[str, Any], words: str) -> None:
    given = {"source": sums, "df": table(one_jvm), "input": INPUT, "output": "score float", **options}
    with pytest.raises(ConfigurationError, match=words):
        predict(given.pop("source"), given.pop("df"), **given)


def test_columns_may_differ_in_case_where_spark_tells_them_apart(one_jvm: Any) -> None:
    one_jvm.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert predict(sums, table(one_jvm), input=INPUT, output="A float").columns == ["id", "a", "b", "A"]
    finally:
        one_jvm.conf.unset("spark.sql.caseSensitive")


def score_while(kill: Callable[[threading.Event], None], session: Any) -> None:
    """Score slowly while a thread kills, until its event is set: each row has its output all the same."""

    def load() -> Any:
        def score(batch: dict[str, Any]) -> Any:
            threading.Event().wait(0.01)
            return batch["x"].sum(1)

        return score

    scored = predict(load, table(session, 20_000), input=INPUT, output="total float", batch_rows=100)
    done = threading.Event()
    killer = threading.Thread(target=kill, args=(done,))
    killer.start()
    rows = scored.collect()
    done.set()
    killer.join()
    assert sorted(row.id for row in rows) == list(range(20_000))
    assert all(row.total == -row.id for row in rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_processes_of_the_model_may_be_killed(one_jvm: Any, seed: int) -> None:
    chance = random.Random(seed)

    def kill(done: threading.Event) -> None:
        watch.until(lambda: any(each.children() for each in servers()))
        for _ in range(2):
            done.wait(chance.uniform(0, 0.3))
            with suppress(IndexError, psutil.NoSuchProcess):
                server = servers()[0]
                chance.choice([server, *server.children()]).kill()

    score_while(kill, one_jvm)


def victims_of(kind: str) -> list[psutil.Process]:
    """Executors of this session, or their Python workers."""
    mine = {each.pid for each in psutil.Process().children(recursive=True)}
    alive = [each for each in psutil.process_iter(["cmdline", "ppid"]) if each.pid in mine and each.info["cmdline"]]
    if kind == "executor":
        return [each for each in alive if any("ExecutorBackend" in word for word in each.info["cmdline"])]
    daemons = [each for each in alive if "pyspark.daemon" in each.info["cmdline"]]
    return [each for each in daemons if each.info["ppid"] in {daemon.pid for daemon in daemons}]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 50))])
def test_executors_and_workers_may_be_killed(two_executors: Any, seed: int) -> None:
    chance = random.Random(seed)
    killed: list[str] = []

    def kill(done: threading.Event) -> None:
        watch.until(lambda: any(each.children() for each in servers()))
        for kind in ["worker", chance.choice(["worker", "executor"])]:
            done.wait(chance.uniform(0, 0.3))
            with suppress(IndexError, psutil.NoSuchProcess):
                chance.choice(victims_of(kind)).kill()
                killed.append(kind)

    score_while(kill, two_executors)
    assert killed
    watch.until(lambda: all(map(has_owner, servers())))


def has_owner(server: psutil.Process) -> bool:
    """Whether the executor of a model's server lives, unless the server has ended meanwhile."""
    with suppress(psutil.NoSuchProcess, ValueError):
        *_, owner, _, _, _ = server.cmdline()  # the arguments of the server, or of the warm process that has forked it
        return psutil.pid_exists(int(owner))
    return True


def hangs(place: str) -> Any:
    """Stack of a process that waits in C code."""

    def load() -> Any:
        if place == "load":
            threading.Event().wait()

        def score(batch: dict[str, Any]) -> Any:
            if place == "exit":
                sys.exit("no more")
            if place == "_exit":
                os._exit(3)
            if (batch["x"][:, 0] == 77).any():
                threading.Event().wait()
            return batch["x"].sum(1)

        if place == "exit in load":
            sys.exit(4)
        if place == "_exit in load":
            os._exit(4)
        return score

    return load


@pytest.mark.parametrize(
    ("place", "words"),
    [
        pytest.param(
            "load",
            r"has not been loaded within 3 s: the loader is in wait at test_predict.py:\d+. Pass a larger",
            marks=pytest.mark.long,
        ),
        ("batch", r"has not computed a batch within 3 s: it is in wait at test_predict.py:\d+. Pass a larger"),
        ("exit", r"row 0 of partition 0 fails: SystemExit: no more \(.*test_predict.py, line \d+, in score\)"),
        pytest.param(
            "_exit", "a process of the model that computed 10 rows ended with exit status 3", marks=pytest.mark.long
        ),
        pytest.param(
            "exit in load",
            r"the model cannot be loaded: SystemExit: 4 \(.*test_predict.py, line \d+, in load\)",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "_exit in load",
            "the model cannot be loaded: the loader ended its process with exit status 4",
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.slow
def test_a_model_that_hangs_or_exits_is_one_sentence(one_jvm: Any, place: str, words: str) -> None:
    rows = 100 if place == "batch" else 10
    scored = predict(hangs(place), table(one_jvm, rows).coalesce(1), input=INPUT, output="total float", timeout=3.0)
    with pytest.raises(Exception, match=words):
        scored.collect()
    if place == "batch":
        assert [len(each.children()) for each in servers()] == [1], "what hung is killed, and the loader stays"


@pytest.mark.long
def test_a_larger_timeout_is_that_of_the_model_that_is_kept(one_jvm: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def load() -> Any:
        Path(folder, str(os.getpid())).touch()

        def score(batch: dict[str, Any]) -> Any:
            threading.Event().wait(4)
            return batch["x"].sum(1)

        return score

    def count(timeout: float) -> int:
        frame = table(one_jvm, 10).coalesce(1)
        return len(predict(load, frame, input=INPUT, output="total float", timeout=timeout).collect())

    with pytest.raises(Exception, match="has not computed a batch within 1 s"):
        count(1)
    assert count(60) == 10
    assert len(os.listdir(folder)) == 1


@pytest.mark.long
def test_a_prediction_of_a_prediction_may_have_the_same_process(one_jvm: Any) -> None:
    """Both are in one stage: the rows of the second are the answers to the first, which are large."""

    def load() -> Any:
        return lambda batch: batch["x"].sum(1, keepdim=True).expand(-1, 512) + 1

    options: Any = {"processes_per_node": 1, "batch_rows": 1024}
    first = predict(load, table(one_jvm, 50_000), input={"x": ["id"]}, output="e array<float>", keep=["id"], **options)
    second = predict(load, first, input={"x": "e"}, output="f array<float>", keep=["id"], **options)
    found = second.select("id", functions.col("f")[0].alias("f"), functions.size("f").alias("size")).where("id < 9")
    assert sorted(map(tuple, found.collect())) == [(i, 512.0 * (i + 1) + 1, 512) for i in range(9)]


@pytest.mark.long
def test_a_batch_that_hangs_ends_no_other_task(one_jvm: Any) -> None:
    frame = table(one_jvm, 40_000)
    scored = [
        predict(hangs("batch"), each, input=INPUT, output="total float", timeout=3.0, processes_per_node=1)
        for each in (frame.where("id < 100"), frame.where("id >= 100"))
    ]
    failed: list[BaseException] = []

    def first() -> None:
        try:
            scored[0].collect()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    rows = scored[1].collect()
    thread.join()
    assert "has not computed a batch within 3 s" in str(failed[0])
    assert len(rows) == 40_000 - 100


@pytest.mark.long
def test_a_job_cancelled_while_the_model_loads_leaves_it_to_the_next(one_jvm: Any, tmp_path: Path) -> None:
    go, folder = str(tmp_path / "go"), str(tmp_path)

    def load() -> Any:
        Path(folder, f"load-{os.getpid()}").touch()
        while not os.path.exists(go):
            threading.Event().wait(0.05)
        return sums()

    scored = predict(load, table(one_jvm, 10), input=INPUT, output="total float")
    context = one_jvm.sparkContext

    def first() -> None:
        context.addJobTag("first")
        with suppress(Exception):
            scored.collect()

    thread = threading.Thread(target=first)
    thread.start()
    watch.until(lambda: list(tmp_path.glob("load-*")))
    context.cancelJobsWithTag("first")
    thread.join()
    second = threading.Thread(target=lambda: found.extend(scored.collect()))
    found: list[Any] = []
    second.start()
    Path(go).touch()
    second.join()
    assert len(found) == 10
    assert len(list(tmp_path.glob("load-*"))) == 1
    assert release() == 1
    watch.until(lambda: not servers())


@pytest.mark.slow
def test_two_models_answer_at_once(one_jvm: Any) -> None:
    def scaled(factor: int) -> Any:
        return lambda: lambda batch: batch["x"].sum(1) * factor

    both = [predict(scaled(factor), table(one_jvm), input=INPUT, output="total float") for factor in (1, 3)]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda factor=factor, each=each: found.update({factor: each.collect()}))
        for factor, each in zip((1, 3), both)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(row.total == -row.id * factor for factor in (1, 3) for row in found[factor])
    assert len(servers()) == 2


@pytest.mark.slow
def test_a_model_ends_with_its_executor(two_executors: Any) -> None:
    predict(sums, table(two_executors), input=INPUT, output="total float").collect()
    assert len(servers()) == 2
    for server in servers():
        *_, owner, _, _, _ = server.cmdline()
        os.kill(int(owner), signal.SIGKILL)
    watch.until(lambda: not servers())


@pytest.mark.slow
def test_a_model_that_nobody_uses_ends(one_jvm: Any) -> None:
    predict(sums, table(one_jvm), input=INPUT, output="total float", keep_warm=1.0).collect()
    watch.until(lambda: not servers())
    assert folders() == []


@pytest.mark.long
def test_columns_may_have_any_names(one_jvm: Any) -> None:
    number = functions.col("id").cast("float")
    frame = one_jvm.range(3).select(number.alias("a.b"), (2 * number).alias("odd `name`"))
    scored = predict(lambda: lambda batch: batch["x"].sum(1), frame, input={"x": frame.columns}, output="`c.d` float")
    assert [tuple(row) for row in scored.sort("`a.b`").collect()] == [(0, 0, 0), (1, 2, 3), (2, 4, 6)]


@pytest.mark.slow
def test_times_are_outputs_in_any_time_zone(one_jvm: Any) -> None:
    def load() -> Any:
        def score(batch: dict[str, Any]) -> Any:
            times = 1_700_000_000_000_000 + batch["n"]
            return {"at": times, "all": times, "in": [{"at": each} for each in times[:, 0].tolist()]}

        return score

    frame = table(one_jvm, 10)
    zone = one_jvm.conf.get("spark.sql.session.timeZone")
    one_jvm.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        output = "at timestamp, all array<timestamp>, in struct<at: timestamp>"
        scored = predict(load, frame, input={"n": "id"}, output=output, keep=["id"])
        found = scored.selectExpr("id", "unix_micros(at)", "unix_micros(all[0])", "unix_micros(in.at)", "string(at)")
        rows = sorted(tuple(row) for row in found.collect())
    finally:
        one_jvm.conf.set("spark.sql.session.timeZone", zone)
    assert [row[1:4] for row in rows] == [(1_700_000_000_000_000 + id,) * 3 for id in range(10)]
    assert rows[0][4] == "2023-11-14 17:13:20"


@pytest.mark.long
def test_matrices_are_inputs_and_outputs(one_jvm: Any) -> None:
    rows = [(i, [[float(i), 1.0, 2.0], [3.0, 4.0, 5.0]], [[1.0] * (i % 2 + 1)] * (i % 3)) for i in range(20)]
    frame = one_jvm.createDataFrame(
        [*rows, (20, [[1.0, None, 2.0]], [])], "id int, m array<array<float>>, r array<array<float>>"
    )

    def load() -> Any:
        return lambda batch: {
            "turned": batch["m"].transpose(1, 2),
            "ragged": [[each * 2 for each in row] for row in batch["r"]],
            "cut": [row[0] for row in batch["m"]],
        }

    scored = predict(
        load,
        frame,
        input={"m": "m", "r": "r"},
        output="turned array<array<float>>, ragged array<array<float>>, cut array<float>",
        on_error="null",
    )
    found = {row.id: row for row in scored.collect()}
    assert found[20].error == "column 'm' is null"
    for i, m, r in rows:
        assert found[i].turned == [list(each) for each in zip(*m)]
        assert found[i].ragged == [[value * 2 for value in each] for each in r]
        assert found[i].cut == m[0]


def test_files_of_the_session_are_modules_of_the_model(one_jvm: Any, tmp_path: Path) -> None:
    (tmp_path / "factor_of_predict.py").write_text("FACTOR = 3\n")
    one_jvm.sparkContext.addPyFile(str(tmp_path / "factor_of_predict.py"))

    def load() -> Any:
        import factor_of_predict

        return lambda batch: batch["x"].sum(1) * factor_of_predict.FACTOR

    rows = predict(load, table(one_jvm, 10), input=INPUT, output="total float").collect()
    assert all(row.total == -3 * row.id for row in rows)


@pytest.mark.long
def test_the_checkpoint_is_chosen_when_predict_is_called(one_jvm: Any, tmp_path: Path) -> None:
    def train(value: float, step: int) -> None:
        module = nn.Linear(2, 1)
        nn.init.constant_(module.weight, 0.0)
        nn.init.constant_(module.bias, value)
        runtime.save_checkpoint({"model": module}, step, wait=True)

    distributor = Distributor(1, local_mode=True, use_gpu=False, name="constant", checkpoints=tmp_path)
    distributor.run(train, 1.0, 1)
    options: dict[str, Any] = {"model": lambda: nn.Linear(2, 1), "input": INPUT, "output": "score float"}
    before = predict(tmp_path / "constant", table(one_jvm, 10), **options)
    Distributor(1, local_mode=True, use_gpu=False, name="constant", checkpoints=tmp_path, resume="never").run(
        train, 2.0, 2
    )
    after = predict(tmp_path / "constant", table(one_jvm, 10), **options)
    assert {row.score for row in before.collect()} == {1.0}
    assert {row.score for row in after.collect()} == {2.0}


CELL = """
def load():
    from pathlib import Path

    Path(FOLDER, f"load-{os.getpid()}").touch()
    return lambda batch: batch["x"].sum(1) * FACTOR
"""


@pytest.mark.slow
def test_a_cell_that_is_run_again_loads_nothing(one_jvm: Any, tmp_path: Path) -> None:
    def again(cell: str, factor: int) -> set[float]:
        names: dict[str, Any] = {"__name__": "__main__", "FOLDER": str(tmp_path), "FACTOR": factor, "os": os}
        exec(compile(cell, f"<cell {len(cell)}>", "exec"), names)
        scored = predict(names["load"], table(one_jvm, 10), input=INPUT, output="total float")
        return {row.total / (row.id or 1) for row in scored.collect()}

    assert again(CELL, 2) == again(f"\n\n{CELL}", 2) == {0.0, -2.0}
    assert len(list(tmp_path.iterdir())) == 1
    assert again(CELL, 3) == {0.0, -3.0}
    assert again(CELL.replace("* FACTOR", "* FACTOR * 2"), 3) == {0.0, -6.0}
    assert len(list(tmp_path.iterdir())) == 3
    assert release() == 3
    watch.until(lambda: not servers())  # their processes end after they have said so


def test_release_spares_a_model_that_a_job_uses(one_jvm: Any, tmp_path: Path) -> None:
    begun, go = str(tmp_path / "begun"), str(tmp_path / "go")

    found: list[Any] = []
    scored = predict(held(begun, go), table(one_jvm, 10).coalesce(1), input=INPUT, output="total float")
    job = threading.Thread(target=lambda: found.extend(scored.collect()))
    job.start()
    watch.until(lambda: os.path.exists(begun))
    assert release() == 0
    Path(go).touch()
    job.join()
    assert len(found) == 10
    assert release() == 1


def test_a_row_that_kills_is_blamed_on_its_task(one_jvm: Any) -> None:
    """Although one process computes for four tasks, several at once."""

    def load() -> Any:
        def score(batch: dict[str, Any]) -> Any:
            if (batch["x"][:, 0] == 760).any():
                os.kill(os.getpid(), signal.SIGKILL)
            return batch["x"].sum(1)

        return score

    frame = table(one_jvm).where("id < 800 OR id > 2000")
    with pytest.raises(Exception, match="3 times, a process of the model that computed the same 50 rows was killed"):
        predict(load, frame, input=INPUT, output="total float", processes_per_node=1).collect()


@pytest.mark.slow
def test_map_makes_inputs_in_the_tasks(one_jvm: Any) -> None:
    def halves(batch: dict[str, Any]) -> dict[str, Any]:
        if (batch["x"][:, 0] == 77).any():
            raise ValueError("cannot be read")
        return {"half": batch["x"] / 2, "pid": [os.getpid()] * len(batch["x"])}

    def load() -> Any:
        here = os.getpid()
        return lambda batch: {"total": batch["half"].sum(1), "apart": [each != here for each in batch["pid"]]}

    options: dict[str, Any] = {"input": INPUT, "output": "total float, apart boolean", "map": halves}
    rows = predict(load, table(one_jvm), on_error="null", **options).collect()
    failed = [row for row in rows if row.error]
    assert [row.id for row in failed] == [77]
    assert re.search(r"ValueError: cannot be read \(.*test_predict.py, line \d+, in halves\)", failed[0].error)
    assert all(row.total == -row.id / 2 and row.apart for row in rows if row.id != 77)
    with pytest.raises(Exception, match="row 77 of partition 0 fails: ValueError: cannot be read"):
        predict(load, table(one_jvm).coalesce(1), **options).collect()
    for wrong, words in (
        (lambda batch: batch["x"], "map= must return a dict of inputs, not ndarray"),
        (lambda batch: {"x": batch["x"][1:]}, r"map= returned 9 values of 'x' for 10 rows"),
    ):
        with pytest.raises(Exception, match=words):
            predict(load, table(one_jvm, 10).coalesce(1), **{**options, "map": wrong}).collect()


def test_large_inputs_are_made_and_sent_in_pieces(one_jvm: Any) -> None:
    """Not as many as Spark's batches have rows, for which the memory would not suffice."""

    def widen(batch: dict[str, Any]) -> dict[str, Any]:
        rows = len(batch["x"])
        return {"wide": np.repeat(batch["x"][:, :1], 1 << 16, axis=1), "rows": np.full(rows, rows)}

    def load() -> Any:
        return lambda batch: {"first": batch["wide"][:, 0], "last": batch["wide"][:, -1], "rows": batch["rows"]}

    options: dict[str, Any] = {"input": INPUT, "output": "first float, last float, rows int", "map": widen}
    rows = predict(load, table(one_jvm, 400).coalesce(1), batch_rows=4, **options).collect()
    assert [(row.id, row.first, row.last) for row in rows] == [(row, row, row) for row in range(400)]
    assert {row.rows for row in rows} == {4, 12}, "three batches of the model have almost 4 MiB"


@pytest.mark.slow
def test_deterministic_values_are_equal_however_rows_are_divided(one_jvm: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def load() -> Any:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 96), nn.Tanh(), nn.Linear(96, 1))

        def score(x: torch.Tensor) -> torch.Tensor:
            Path(folder, str(len(x))).touch()
            return network(x / 1000)

        return lambda batch: score(batch["x"])

    found = [
        {
            row.id: row.score
            for row in predict(
                load, frame, input=INPUT, output="score float", batch_rows=64, deterministic=True
            ).collect()
        }
        for frame in (table(one_jvm, 1000), table(one_jvm, 1000).repartition(7), table(one_jvm, 1000).coalesce(1))
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1000
    assert [each.name for each in tmp_path.iterdir()] == ["64"]


def visible() -> Any:
    def score(batch: dict[str, Any]) -> Any:
        threading.Event().wait(0.01)
        return [f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}"] * len(batch["x"])

    return score


def places(scored: Any, rows: int = ROWS) -> list[str]:
    """The GPU and the pid of each process that has computed rows, of which there is one for each row of the table."""
    found = scored.collect()
    assert sorted(row.id for row in found) == list(range(rows))
    return sorted({row.place for row in found})


@pytest.mark.long
@pytest.mark.parametrize("amount", [None, pytest.param("0.5", marks=pytest.mark.long)], ids=["profile", "settings"])
def test_tasks_that_share_a_gpu_feed_one_process_there(sessions: Sessions, tmp_path: Path, amount: str | None) -> None:
    """Spark hands out the GPUs that a script names, on which nobody computes."""
    if amount is None:
        pytest.importorskip("pyspark", "4", "tasks of DataFrames cannot ask for GPUs on PySpark 3.5")
    settings = two_gpus(tmp_path / "gpus.sh", """echo '{"name": "gpu", "addresses": ["0", "1"]}'""")
    settings |= {} if amount is None else {"spark.task.resource.gpu.amount": amount}
    session = sessions.get("local-cluster[1,4,1024]", **settings)
    scored = predict(visible, table(session), input=INPUT, output="place string", num_gpus=1)
    first = places(scored)
    assert [each.split()[0] for each in first] == ["0", "1"]
    assert places(scored) == first, "the models stay"
    assert [len(each.children()) for each in servers()] == [1, 1]
    with pytest.raises(Exception, match=r"torch \S+ sees no GPU \(CUDA_VISIBLE_DEVICES=[01], "):
        predict(nn.Identity, table(session), input=INPUT, output="y array<float>", num_gpus=1).collect()


@pytest.fixture
def two_seen(sessions: Sessions) -> Any:
    """A session whose tasks run in the driver's JVM, and see two GPUs, which are none."""
    return sessions.get("local[4]", **{"spark.executorEnv.CUDA_VISIBLE_DEVICES": "4,6"})


@pytest.mark.long
def test_tasks_of_the_drivers_jvm_take_turns_with_its_gpus(two_seen: Any) -> None:
    def seen(num_gpus: int) -> list[str]:
        scored = predict(visible, table(two_seen), input=INPUT, output="place string", num_gpus=num_gpus)
        return [each.split()[0] for each in places(scored)]

    assert seen(1) == ["4", "6"]
    assert seen(2) == ["4,6"]
    with pytest.raises(Exception, match=r"num_gpus=3\): this task has 2 GPUs \(CUDA_VISIBLE_DEVICES=4,6, "):
        seen(3)


@pytest.mark.long
def test_a_process_on_a_gpu_may_be_killed(two_seen: Any) -> None:
    scored = predict(visible, table(two_seen, 20_000), input=INPUT, output="place string", batch_rows=100, num_gpus=2)
    found: list[str] = []
    job = threading.Thread(target=lambda: found.extend(places(scored, 20_000)))
    job.start()
    for _ in range(2):
        watch.until(lambda: any(each.children() for each in servers()))
        with suppress(IndexError, psutil.NoSuchProcess):
            servers()[0].children()[0].kill()
    job.join()
    assert found


@pytest.mark.long
def test_a_model_that_hangs_on_a_gpu_is_one_sentence(two_seen: Any) -> None:
    frame = table(two_seen, 100).coalesce(1)
    words = r"has not computed a batch within 3 s: it is in wait at test_predict.py:\d+. Pass a larger"
    with pytest.raises(Exception, match=words):
        predict(hangs("batch"), frame, input=INPUT, output="total float", timeout=3.0, num_gpus=1).collect()
    watch.until(lambda: not servers())


def placed_sums() -> Any:
    """A model that says where it computes."""
    place = f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}"

    def score(batch: dict[str, Any]) -> Any:
        threading.Event().wait(0.01)
        return {"total": batch["x"].sum(1), "place": [place] * len(batch["x"])}

    return score


def pids_by_gpu(session: Any) -> dict[str, int]:
    """The process on each GPU that has computed rows, all of which are right."""
    output = "total float, place string"
    rows = predict(placed_sums, table(session), input=INPUT, output=output, num_gpus=1).collect()
    assert sorted(row.id for row in rows) == list(range(ROWS))
    assert all(row.total == -row.id for row in rows)
    places = [each.split() for each in sorted({row.place for row in rows})]
    assert len({gpu for gpu, _ in places}) == len(places)
    return {gpu: int(pid) for gpu, pid in places}


def alive_in_a_rank(pids: list[int]) -> tuple[str, list[int]]:
    """The GPUs that this rank sees, and which processes there are, but for zombies, which have no memory."""
    return os.environ["CUDA_VISIBLE_DEVICES"], [pid for pid in pids if processes.state(pid)]


@pytest.mark.long
def test_a_run_on_executors_ends_the_model_on_its_gpu(sessions: Sessions, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", "4", "tasks of DataFrames cannot ask for GPUs on PySpark 3.5")
    settings = two_gpus(tmp_path / "gpus.sh", """echo '{"name": "gpu", "addresses": ["0", "1"]}'""")
    session = sessions.get("local-cluster[1,4,1024]", **settings)
    before = pids_by_gpu(session)
    assert sorted(before) == ["0", "1"]
    predict(sums, table(session), input=INPUT, output="total float").collect()
    (on_cpus,) = (each.pid for each in servers() if not {*before.values()} & {child.pid for child in each.children()})
    pids = [*before.values(), on_cpus]

    assert Distributor(1, local_mode=False, use_gpu=False).run(alive_in_a_rank, pids) == ("", pids)
    gpu, alive = Distributor(1, local_mode=False, use_gpu=True, env={CHECK_GPUS: "0"}).run(alive_in_a_rank, pids)
    assert alive == [pid for pid in pids if pid != before[gpu]]
    after = pids_by_gpu(session)
    assert sorted(after) == ["0", "1"]
    assert [each for each in "01" if after[each] == before[each]] == [each for each in "01" if each != gpu]


@pytest.mark.usefixtures("fake_gpus")
@pytest.mark.slow
def test_a_run_on_this_machine_ends_the_model_on_its_gpu(two_seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    before = pids_by_gpu(two_seen)
    gpu, alive = Distributor(1, local_mode=True, use_gpu=True).run(alive_in_a_rank, [*before.values()])
    assert (gpu, alive) == ("4", [before["6"]])
    after = pids_by_gpu(two_seen)
    assert after["4"] != before["4"] and after["6"] == before["6"]


@pytest.mark.long
@pytest.mark.usefixtures("fake_gpus")
def test_a_model_in_use_ends_after_its_tasks(
    two_seen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without executors, Spark does not count GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    begun, go = str(tmp_path / "begun"), str(tmp_path / "go")

    scored = predict(held(begun, go), table(two_seen).coalesce(1), input=INPUT, output="total float", num_gpus=1)
    found: list[Any] = []
    job = threading.Thread(target=lambda: found.extend(scored.collect()))
    job.start()
    watch.until(lambda: os.path.exists(begun))
    Distributor(1, local_mode=True, use_gpu=True).run(Path(go).touch)
    job.join()
    assert sorted(row.id for row in found) == list(range(ROWS))
    assert all(row.total == -row.id for row in found)
    assert "shares the memory of GPU 4 with a model that tasks of predict still use" in caplog.text
    watch.until(lambda: not servers())


ENGINE = """
import http.server, json

class Sums(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([sum(row) for row in rows]).encode())

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sums)
print(server.server_port, flush=True)
server.serve_forever()
"""


def engine() -> Any:
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", ENGINE]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert started.stdout is not None
    port = int(started.stdout.readline())

    def score(batch: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/", json.dumps(batch["x"].tolist()))
        return torch.tensor(json.load(connection.getresponse()))

    return score


def engines() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        is_engine = ENGINE in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE
        if is_engine and is_mine(process):
            found.append(process)
    return found


@pytest.mark.parametrize("victim", ["none", "loader", "server"])
@pytest.mark.slow
def test_an_engine_that_serves_by_itself_ends_with_its_model(one_jvm: Any, victim: str) -> None:
    scored = predict(engine, table(one_jvm), input=INPUT, output="total float")
    assert all(row.total == -row.id for row in scored.collect())
    assert len(engines()) == 1, "all processes that compute ask one"
    if victim == "none":
        assert release() == 1
    else:
        loader = engines()[0].parent()
        assert loader is not None
        (loader if victim == "loader" else servers()[0]).kill()
    watch.until(lambda: not engines() and not servers())


@pytest.mark.parametrize(
    ("place", "who"),
    [
        ("load", "3 times, the process that loads the model"),
        ("batch", "3 times, a process of the model that computed the same 10 rows"),
    ],
)
@pytest.mark.slow
def test_lack_of_memory_is_named(one_jvm: Any, small_memory: Path, place: str, who: str) -> None:
    group = str(small_memory)

    def devour() -> None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        kept = [b"x" * (8 << 20) for _ in range(32)]
        raise RuntimeError(f"no limit: {len(kept)} pieces of 8 MiB")

    def load() -> Any:
        return devour() if place == "load" else lambda batch: devour()

    words = rf"{who} was killed by SIGKILL, most likely for lack of memory: .* Pass a smaller batch_rows= or"
    with pytest.raises(Exception, match=words):
        predict(load, table(one_jvm, 10).coalesce(1), input=INPUT, output="total float").collect()
