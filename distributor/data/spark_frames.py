"""Spark's side of a snapshot: a DataFrame's types, its tasks, and whether its source has changed."""

from __future__ import annotations

import hashlib
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distributor.data.manifest import DataFile
from distributor.data.writer import FieldRecipe, Packs, Recipe, sources_of, unpacked, write_part
from distributor.errors import ConfigurationError, RunCancelledError
from distributor.schedulers.spark import sessions
from distributor.schedulers.spark.scheduler import portable
from distributor.values import codec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_POLL = 0.25  # seconds between two checks whether the run is still wanted

#: Types of columns that may travel as one array.
_PACKED = {"tinyint", "smallint", "int", "bigint", "float", "double", "boolean"}

#: Parts of a plan whose text does not show which rows they have; ``Relation(`` is of JDBC and others without files.
_OPAQUE = (
    *("LogicalRDD", "LocalRelation", "ExistingRDD", "InMemoryRelation", "HiveTableRelation", "RelationV2"),
    *("Relation(", "UDF(", " more fields"),
)

#: Other parts of such plans: files whose options are not in the text, times and random numbers, files of subqueries.
_UNSEEN = re.compile(
    r"\bRelation .*\] (?!parquet|orc|binaryFile)"
    r"|\b(?:current_\w+|localtimestamp|now|rand\w*|uniform|uuid|shuffle|user|session_user)\("
    r"|(?:subquery|exists|list)#\d+ \["
)

_MOST_FIELDS = "spark.sql.debug.maxToStringFields"  # a longer list is cut short in a plan's text

_setting = threading.Lock()  # held while it is another


def is_frame(source: Any) -> bool:
    """Return whether this is a Spark DataFrame, classic or Connect."""
    return type(source).__module__.startswith("pyspark.sql.") and hasattr(source, "mapInArrow")


def types_of(frame: DataFrame) -> dict[str, str]:
    """Return the columns' types. ConfigurationError: the frame is a stream, or has two columns of one name."""
    if frame.isStreaming:
        raise ConfigurationError(
            "Data: a streaming DataFrame has no end: write it to a table first, and pass a DataFrame of that table"
        )
    types = dict(frame.dtypes)
    if len(types) < len(frame.columns):
        twice = next(name for name in frame.columns if frame.columns.count(name) > 1)
        raise ConfigurationError(f"Data: the DataFrame has two columns {twice!r}: rename one")
    return types


def plan_of(frame: DataFrame) -> str:
    """Return a digest of the frame's plan and input files; empty if it would not show that the rows have changed."""
    with suppress(Exception):  # a private part of PySpark, or a source that does not say
        session = frame.sparkSession
        with _whole_texts(session):
            text = _analyzed(frame)
        if _shows_rows(text) and not (sessions.is_connect(session) and "View (" in text):  # its plan is not here
            zone = session.conf.get("spark.sql.session.timeZone")
            text = re.sub(r"#\d+L?|(?<=CTERelation...) \d+", "", text)
            shown = (text, _structure(frame), frame.schema.json(), zone)
            return hashlib.sha256(repr((shown, sorted(frame.inputFiles()))).encode()).hexdigest()
    return ""


def _shows_rows(text: str) -> bool:
    """Whether a plan would show other rows; not with Python functions, calls with a number that no column has."""
    named = "".join(re.findall(r"\bRelation [^[]*\[.*| AS [^#]*#\d+", text))
    calls = set(re.findall(r"\)#(\d+)", text)) - set(re.findall(r"\)#(\d+)", named))
    return not (calls or _UNSEEN.search(text) or any(part in text for part in _OPAQUE))


@contextmanager
def _whole_texts(session: Any) -> Iterator[None]:
    """Let Spark cut no list in a plan's text short, where it lets users set that."""
    with _setting:
        before = None
        with suppress(Exception):
            value = session.conf.get(_MOST_FIELDS)
            session.conf.set(_MOST_FIELDS, str(1 << 30))
            before = value
        try:
            yield
        finally:
            if before is not None:
                session.conf.set(_MOST_FIELDS, before)


def _analyzed(frame: Any) -> str:
    """Return a frame's analyzed plan as text."""
    if sessions.is_connect(frame.sparkSession):
        return str(frame._explain_string(extended=True)).partition("== Optimized")[0]
    return str(frame._jdf.queryExecution().analyzed().toString())


def _structure(frame: Any) -> str:
    """Return a frame's plan with the types of values, and with ids numbered as they appear, which its text lacks."""
    if sessions.is_connect(frame.sparkSession):
        plan = re.sub(r"\bcall_site: .*", "", str(frame._plan.to_proto(frame.sparkSession.client)))
        ids = r"(?m)\bplan_id: \d+$"
    else:
        # Without bytes, which are an address, and times of views.
        plan = re.sub(r'"\[B@\w+"|"createTime":\d+', "", frame._jdf.queryExecution().analyzed().toJSON())
        plan, ids = plan.replace('"cteId":', '"id":'), r'"id":\d+(,"jvmId":"[^"]*")?'
    numbers: dict[str, str] = {}
    return re.sub(ids, lambda found: numbers.setdefault(found[0], f"#{len(numbers)}"), plan)


def write(
    frame: DataFrame, recipe: Recipe, folder: str, types: Mapping[str, str], wanted: Callable[[], bool]
) -> list[DataFile]:
    """Write a frame's rows with a Spark job; return what its tasks have written.

    Raises:
        ConfigurationError: executors lack a package.
        RunCancelledError: the job was ended, because the snapshot is no longer ``wanted()``.
    """
    packs = packs_of(recipe.outputs, types)
    session: Any = frame.sparkSession
    needed = columns(sources_of(recipe.outputs), types, packs)
    with sessions.arrow_python(session), _cancelled_unless(wanted, session) as ended:
        try:
            rows = mapped(frame, needed, _Task(recipe, folder, packs), "part binary").collect()
        except Exception as error:
            if ended.is_set():
                raise RunCancelledError("the run was cancelled while its data was written") from None
            missing = re.search(r"No module named '(\w+)'", str(error))
            if missing is not None:
                raise ConfigurationError(
                    f"data= needs {missing[1]} on the executors, where it is not installed: install pyarrow, pandas "
                    "and numpy there"
                ) from None
            raise
    return [codec.read(DataFile, bytes(row[0])) for row in rows]


def columns(names: Iterable[str], types: Mapping[str, str], packs: Packs = ()) -> list[Any]:
    """Return columns by their names, ML vectors as arrays. Each of ``packs`` is an array under its first name."""
    from pyspark.sql import functions

    found = [functions.array(*columns(pack, types)).alias(pack[0]) for pack in packs]
    packed = {name for pack in packs for name in pack}
    for name in (each for each in names if each not in packed):
        column = functions.col(f"`{name.replace('`', '``')}`")
        if types[name] == "vector":
            from pyspark.ml.functions import vector_to_array

            column = functions.when(column.isNotNull(), vector_to_array(column, "float32")).alias(name)
        found.append(column)
    return found


def packs_of(outputs: Iterable[FieldRecipe], types: Mapping[str, str], apart: Iterable[str] = ()) -> Packs:
    """Return the columns that Spark sends as one array, much sooner than as columns; those ``apart`` stay columns."""
    found: list[tuple[str, ...]] = []
    for output in outputs:
        is_new = set(output.sources).isdisjoint([*apart, *(name for pack in found for name in pack)])
        if output.is_packed and is_new and len(kinds := {types[name] for name in output.sources}) == 1:
            found += [output.sources] if kinds <= _PACKED else []
    return tuple(found)


def mapped(
    frame: DataFrame, chosen: Iterable[Any], runs: Any, schema: Any, own: Iterable[ModuleType] = (), **options: Any
) -> DataFrame:
    """Return what ``runs.run`` makes of the chosen columns, in tasks.

    On the way, columns are numbered: ``mapInArrow`` takes a dot in a name for the field of a struct.
    """
    selected = frame.select(*chosen)
    numbered = selected.toDF(*(f"c{number}" for number in range(len(selected.columns))))
    return numbered.mapInArrow(task_of(_Named(tuple(selected.columns), runs), own), schema, **options)


def task_of(runs: Any, own: Iterable[ModuleType] = ()) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function for ``mapInArrow`` that calls ``runs.run``: nested, so that it is pickled by value.

    So are the user's ``own`` modules that it uses.
    """
    packed = portable(runs, own)

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pickle
        import zlib

        yield from pickle.loads(zlib.decompress(packed)).run(batches)

    return task


class _Named:
    """A task whose columns get their names back."""

    def __init__(self, names: tuple[str, ...], runs: Any) -> None:
        self.names = names
        self.runs = runs

    def run(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        yield from self.runs.run(pa.RecordBatch.from_arrays(batch.columns, self.names) for batch in batches)


class _Task:
    """What one task does."""

    def __init__(self, recipe: Recipe, folder: str, packs: Packs) -> None:
        self.recipe = recipe
        self.folder = folder
        self.packs = packs

    def run(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        part = write_part(
            self.folder, self.recipe, context.partitionId(), (unpacked(batch, self.packs) for batch in batches)
        )
        if part.file or part.nulls or part.problem:
            yield pa.RecordBatch.from_arrays([pa.array([codec.pack(part)], pa.binary())], ["part"])


@contextmanager
def _cancelled_unless(wanted: Callable[[], bool], session: Any) -> Iterator[threading.Event]:
    """Cancel this thread's Spark jobs once the snapshot is no longer wanted, or if the block raises."""
    tag = f"distributor-data-{uuid.uuid4().hex}"
    connect = sessions.is_connect(session)
    context: Any = None if connect else session.sparkContext
    marks: Any = session if connect else context
    add, remove = (marks.addTag, marks.removeTag) if connect else (marks.addJobTag, marks.removeJobTag)
    add(tag)
    cancel: Any = session.interruptTag if connect else context.cancelJobsWithTag
    done, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(_POLL):
            if not wanted():
                ended.set()
                with suppress(Exception):  # the context may be stopped
                    cancel(tag)

    watcher = threading.Thread(target=watch, name="distributor-data", daemon=True)
    watcher.start()
    try:
        with nullcontext() if connect else sessions.named(context, sessions.users_call()):
            yield ended
    except BaseException:
        with suppress(Exception):
            cancel(tag)
        raise
    finally:
        done.set()
        watcher.join()
        with suppress(Exception):
            remove(tag)
