"""A DataFrame scored by a model: one row for each row, whatever is killed, and nothing left behind."""

from __future__ import annotations

import glob
import os
import random
import re
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import watch
from pyspark.sql import functions
from torch import nn

from distributor import ConfigurationError, Distributor, predict, release, runtime
from distributor.machine.folders import remove_stale

pytestmark = pytest.mark.spark

ROWS = 3_000


def table(session: Any, rows: int = ROWS) -> Any:
    number = functions.col("id")
    return session.range(rows, numPartitions=4).select(
        "id", number.cast("float").alias("a"), (-2 * number).cast("float").alias("b")
    )


def servers() -> list[psutil.Process]:
    """This session's processes that have loaded a model; those that they forked are their children."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        if any(
            each.startswith(f"{tempfile.gettempdir()}/distributor-model-") for each in process.info["cmdline"] or ()
        ):
            found.append(process)
    pids = {each.pid for each in found}
    return [each for each in found if each.info["ppid"] not in pids]


def folders() -> list[str]:
    return glob.glob(f"{tempfile.gettempdir()}/distributor-model-*")


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    yield
    for server in servers():
        server.send_signal(signal.SIGTERM)
    watch.until(lambda: not servers())
    remove_stale()
    assert folders() == []


def sums() -> Any:
    return lambda batch: batch["x"].sum(1)


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
        ("killed", "3 times, the process that loads the model was killed by SIGKILL"),
        ("nothing", "must return a module or a function of a batch, not NoneType"),
        ("short", r"the output 'total' of \d+ rows is of shape \[\d+\]: the model must return one value for each row"),
        ("names", r"the model returned \['other'\], without the output 'total'"),
        ("text", "the output 'total' cannot become float"),
        ("sparse", "the model's outputs cannot be sent: TypeError"),
        ("functions", r"the model's outputs cannot be sent: .*pickle"),
    ],
)
def test_a_model_that_is_wrong_is_one_sentence(one_jvm: Any, kind: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        predict(broken(kind), table(one_jvm, 10).coalesce(1), input=INPUT, output="total float").collect()


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
        ({"keep": ["z"]}, "no column 'z'"),
        ({"on_error": "skip"}, "'raise' or 'null', not 'skip'"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"timeout": 0}, "timeout"),
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


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 50))])
def test_processes_of_the_model_may_be_killed(one_jvm: Any, seed: int) -> None:
    def load() -> Any:
        def score(batch: dict[str, Any]) -> Any:
            threading.Event().wait(0.01)
            return batch["x"].sum(1)

        return score

    chance = random.Random(seed)
    scored = predict(load, table(one_jvm, 20_000), input=INPUT, output="total float", batch_rows=100)
    done = threading.Event()

    def kill() -> None:
        watch.until(lambda: any(each.children() for each in servers()))
        for _ in range(2):
            done.wait(chance.uniform(0, 0.3))
            with suppress(IndexError, psutil.NoSuchProcess):
                server = servers()[0]
                chance.choice([server, *server.children()]).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    rows = scored.collect()
    done.set()
    killer.join()
    assert sorted(row.id for row in rows) == list(range(20_000))
    assert all(row.total == -row.id for row in rows)


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
        (
            "load",
            r"has not been loaded within 3 s: the loader is in wait at test_predict.py:\d+. Pass a larger",
        ),
        ("batch", r"has not computed a batch within 3 s: it is in wait at test_predict.py:\d+. Pass a larger"),
        ("exit", r"row 0 of partition 0 fails: SystemExit: no more \(.*test_predict.py, line \d+, in score\)"),
        ("_exit", "a process of the model that computed 10 rows ended with exit status 3"),
        ("exit in load", r"the model cannot be loaded: SystemExit: 4 \(.*test_predict.py, line \d+, in load\)"),
        ("_exit in load", "the model cannot be loaded: the loader ended its process with exit status 4"),
    ],
)
def test_a_model_that_hangs_or_exits_is_one_sentence(one_jvm: Any, place: str, words: str) -> None:
    rows = 100 if place == "batch" else 10
    scored = predict(hangs(place), table(one_jvm, rows).coalesce(1), input=INPUT, output="total float", timeout=3.0)
    with pytest.raises(Exception, match=words):
        scored.collect()
    if place == "batch":
        assert [len(each.children()) for each in servers()] == [1], "what hung is killed, and the loader stays"


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


def test_a_model_that_nobody_uses_ends(one_jvm: Any) -> None:
    predict(sums, table(one_jvm), input=INPUT, output="total float", keep_warm=1.0).collect()
    watch.until(lambda: not servers())
    assert folders() == []


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
    watch.until(lambda: not servers())


def test_release_spares_a_model_that_a_job_uses(one_jvm: Any, tmp_path: Path) -> None:
    begun, go = str(tmp_path / "begun"), str(tmp_path / "go")

    def load() -> Any:
        def score(batch: dict[str, Any]) -> Any:
            Path(begun).touch()
            while not os.path.exists(go):
                threading.Event().wait(0.05)
            return batch["x"].sum(1)

        return score

    found: list[Any] = []
    scored = predict(load, table(one_jvm, 10).coalesce(1), input=INPUT, output="total float")
    job = threading.Thread(target=lambda: found.extend(scored.collect()))
    job.start()
    watch.until(lambda: os.path.exists(begun))
    assert release() == 0
    Path(go).touch()
    job.join()
    assert len(found) == 10
    assert release() == 1


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
