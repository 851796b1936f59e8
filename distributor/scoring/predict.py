"""The public function ``predict``: runs on the driver, and returns a lazy DataFrame."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from distributor.data import spark_frames
from distributor.data.source import Data, recipe
from distributor.errors import ConfigurationError
from distributor.machine.storage import open_storage
from distributor.schedulers.spark import sessions, slots
from distributor.shipping import modules, package, pickling
from distributor.shipping.fingerprint import fingerprint
from distributor.values.checkpoints import Checkpoints, from_environ
from distributor.values.checks import check_count, check_seconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MANY = 1 << 16  # rows, some of them for each core of a cluster


def predict(
    source: Callable[[], Any] | str | os.PathLike[str],
    df: DataFrame,
    *,
    model: Callable[[], Any] | None = None,
    input: Mapping[str, str | Sequence[str]],
    output: str,
    keep: Literal["*"] | Sequence[str] = "*",
    map: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    batch_rows: int = 4096,
    on_error: Literal["raise", "null"] = "raise",
    error_column: str = "error",
    deterministic: bool = False,
    num_gpus: int = 0,
    processes_per_node: int | None = None,
    timeout: float = 600.0,
    keep_warm: float = 600.0,
) -> DataFrame:
    """Score a DataFrame with a model that each executor loads once: one row for each row, with outputs added.

    The tasks of an executor send their rows to processes that have forked from the one that loaded the model, and so
    share its memory. These compute for later stages, jobs and calls too, if the model is the same.

    Args:
        source: a function that loads the model, and returns a module or a function of a batch; or, with ``model``, the
            folder or URL of checkpoints, or the name of a run, whose entry ``model`` is loaded: from the newest
            checkpoint at the time of this call. The folder of one checkpoint will do too. All executors must see it.
        df: a DataFrame, classic or Connect.
        model: a function that builds the module, such as its class.
        input: columns by the name of the input. Numbers become a tensor [rows, columns], arrays and ML vectors of
            equal length a tensor [rows, length], strings and binary values lists. A module with one input gets it as
            its argument, one with several by their names; a function gets a dict.
        output: names and types of the outputs, as Spark writes them: ``"score float, label int"``. The model returns a
            tensor, an array or a list with a value for each row; for several outputs a dict or a tuple of these.
        keep: the columns that come before the outputs (default: all).
        map: a function that the tasks call, on all cores, before the model: of the dict of inputs of some rows, NumPy's
            arrays or lists, to such a dict for the model, such as one that decodes images.
        batch_rows: number of rows that the model gets at most at once.
        on_error: ``"raise"`` (default) ends the job at a row that fails or has nulls, and shows its inputs; ``"null"``
            gives this row null outputs, and an error's text in ``error_column``.
        error_column: the name of that column, with ``on_error="null"``.
        deterministic: whether the model gets exactly ``batch_rows`` rows each time, the last one repeated as needed:
            outputs are then equal bit for bit, however the rows are divided.
        num_gpus: number of GPUs of a model (default: 0). Each GPU of an executor then has a model, or each ``num_gpus``
            together, in one process, which sees no other; several tasks feed it. A module is moved to the first of
            them, and its inputs too; a function of a batch chooses its device, and gets tensors of the CPU.
        processes_per_node: how many processes of an executor compute, each with its share of the CPUs (default: as many
            as it may use CPUs).
        timeout: seconds for the load, and for each batch, after which the model counts as hanging, and the job fails.
        keep_warm: seconds for which an executor keeps a model that no task uses.

    Raises:
        ConfigurationError: an argument is wrong, or tasks cannot have such GPUs, before anything starts.

    Example:
        >>> predict("saved/digits", df, model=Net, input={"x": features}, output="score float")  # doctest: +SKIP
    """
    from distributor.data.writer import sources_of
    from distributor.scoring.client import ModelOrder
    from distributor.scoring.partition import ScoringTask

    if not spark_frames.is_frame(df):
        raise ConfigurationError(f"predict: df must be a Spark DataFrame, not {type(df).__name__}")
    if map is not None and not callable(map):
        raise ConfigurationError(f"predict: map must be a function of a dict of inputs, not {map!r}")
    if on_error not in ("raise", "null"):
        raise ConfigurationError(f"predict: on_error must be 'raise' or 'null', not {on_error!r}")
    if not isinstance(error_column, str) or not error_column:
        raise ConfigurationError(f"predict: error_column must be a column's name, not {error_column!r}")
    types = spark_frames.types_of(df)
    kept = _kept(keep, types)
    outputs = _outputs(df, output)
    added = [*(field.name for field in outputs), *([error_column] if on_error == "null" else [])]
    is_exact = df.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    names = [name if is_exact else name.lower() for name in (*added, *kept)]
    for name, same in zip(added, names):
        if names.count(same) > 1:
            raise ConfigurationError(
                f"predict: there would be two columns {name!r}: rename one, or leave it out of keep"
            )
    fields = _fields(input, types)
    packs = spark_frames.packs_of(fields, types, apart=kept)
    if num_gpus and processes_per_node is not None:
        raise ConfigurationError("predict: a model on GPUs has one process: pass num_gpus or processes_per_node")
    gpus = check_count("num_gpus", num_gpus, 0)
    profile, driver_gpus = _gpu_tasks(gpus, df.sparkSession) if gpus else (None, ())
    call, identity = _call(source, model)
    key = hashlib.sha256(package.package_zip() + repr((identity, processes_per_node)).encode()).hexdigest()
    task = ScoringTask(
        ModelOrder(
            key=key,
            package=package.package_zip(),
            call=call,
            processes=0 if processes_per_node is None else check_count("processes_per_node", processes_per_node),
            keep=check_seconds("keep_warm", keep_warm, 1.0),
            timeout=check_seconds("timeout", timeout, 1.0),
        ),
        inputs=fields,
        packs=packs,
        keep=kept,
        outputs=_arrow_types(outputs),
        batch_rows=check_count("batch_rows", batch_rows),
        on_error=on_error,
        error_column=error_column if on_error == "null" else "",
        map=map,
        deterministic=deterministic,
        num_gpus=gpus,
        driver_gpus=driver_gpus,
    )
    needed = spark_frames.columns(dict.fromkeys([*kept, *sources_of(fields)]), types, packs)
    sessions.keep_arrow_python(df.sparkSession)
    options = {} if profile is None else {"profile": profile}
    schema = _schema(df, kept, outputs, added)
    return spark_frames.mapped(df, needed, task, schema, modules.own_modules(), **options)


def release() -> int:
    """End the models that :func:`predict` keeps on the executors of the active session, and that no job uses.

    Executors whose cores are all busy are passed over.

    Returns:
        The number of models that were ended.

    Raises:
        ConfigurationError: there is no active Spark session.

    Example:
        >>> release()  # doctest: +SKIP
        2
    """
    from distributor.scoring.partition import ReleaseTask

    session = sessions.active_session()
    if session is None:
        raise ConfigurationError("release: there is no active Spark session")
    rows = session.range(_MANY)  # in as many partitions as there are cores, which Spark spreads over all executors
    with sessions.arrow_python(session):
        ended = rows.mapInArrow(spark_frames.task_of(ReleaseTask()), "ended int").collect()
    return sum(row.ended for row in ended)


def _kept(keep: str | Sequence[str], types: Mapping[str, str]) -> tuple[str, ...]:
    names = tuple(types) if keep == "*" else (keep,) if isinstance(keep, str) else tuple(keep)
    for name in names:
        if name not in types:
            raise ConfigurationError(f"predict(keep=...): there is no column {name!r}")
        if names.count(name) > 1:
            raise ConfigurationError(f"predict(keep=...): column {name!r} is named twice")
        if types[name] == "vector":
            raise ConfigurationError(
                f"predict: column {name!r} has ML vectors, which cannot be kept: name the columns to keep, keep=[...]"
            )
    return names


def _outputs(df: DataFrame, output: str) -> list[Any]:
    """Return the outputs as fields of Spark's schema, which may all be null: Spark reads a null as 0 in others."""
    from pyspark.sql.types import StructField

    try:
        fields = df.sparkSession.createDataFrame([], output).schema.fields
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"predict: output={output!r} is no list of names and types: {first}") from None
    return [StructField(field.name, field.dataType) for field in fields]


def _fields(input: Mapping[str, Any], types: Mapping[str, str]) -> tuple[Any, ...]:
    if not input or not isinstance(input, Mapping):
        raise ConfigurationError(f"predict: input must be a dict such as {{'x': ['age', 'height']}}, not {input!r}")
    try:
        return recipe(Data(None, pack=input), {name: _flat(kind) for name, kind in types.items()}).outputs
    except ConfigurationError as error:
        raise ConfigurationError(f"predict(input=...): {str(error).removeprefix('Data: ')}") from None


def _flat(kind: str) -> str:
    """Return the type of arrays of numbers for one of arrays of arrays, of any depth."""
    while (inner := re.fullmatch(r"array<(array<.*>)>", kind)) is not None:
        kind = inner[1]
    return kind


def _call(source: Any, model: Any) -> tuple[bytes, str]:
    """Return the pickled call that loads the model, and what is the same for the same model."""
    if callable(source) and model is None:
        return _pickled(source), _identity(source)
    if isinstance(source, (str, os.PathLike)) and callable(model):
        from distributor.scoring.model import load_module

        place, folder = _newest(os.fspath(source))
        return _pickled(load_module, model, place, folder), _identity(model, place, folder)
    raise ConfigurationError(
        "predict: pass a function that loads the model, or the folder of checkpoints and model=, which builds it: "
        f"source is {source!r}, model is {model!r}"
    )


def _identity(*values: Any) -> str:
    try:
        return fingerprint(*values)
    except Exception:  # a value that another way of pickling takes
        return hashlib.sha256(_pickled(tuple, *values)).hexdigest()


def _newest(source: str) -> tuple[str, str]:
    """Return a place, and the folder there of the checkpoint that is meant, or of the newest that has all its files."""
    from distributor.checkpoint import places
    from distributor.checkpoint.catalog import Catalog

    try:
        found = places.find(source, from_environ(os.environ))
        newest = Catalog(open_storage(found.place), Checkpoints(found.place), only=found.only).latest({}, states=True)
    except ConfigurationError as error:
        raise ConfigurationError(f"predict: {str(error).removeprefix('load_checkpoint: ')}") from None
    if newest is None:
        raise ConfigurationError(f"predict: no checkpoint in {found.place!r} has all its files")
    return found.place, newest.folder


def _gpu_tasks(num_gpus: int, session: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the resource profile of tasks that feed models on GPUs, if they need one, and the driver's GPUs."""
    from pyspark import __version__

    cluster = slots.cluster_of(session)
    spark = min(__version__, str(session.version), key=lambda version: int(version.partition(".")[0]))
    needed = slots.model_profile(num_gpus, cluster, spark)
    profile = None if needed is None else slots.profile(session, needed)
    if not cluster.is_local:
        return profile, ()
    amount = "spark.driver.resource.gpu.amount"
    if sessions.is_connect(session) and (drivers := sessions.conf(session, amount)):
        raise ConfigurationError(
            f"predict(num_gpus={num_gpus}): the server runs tasks itself, on the GPUs that Spark found for its driver "
            f"({amount}={drivers}), and Spark Connect does not say which these are: start it without that setting, and "
            "with CUDA_VISIBLE_DEVICES set to them"
        )
    return profile, () if sessions.is_connect(session) else sessions.driver_gpus() or ()


def _pickled(function: Callable[..., Any], *args: Any) -> bytes:
    content = pickling.dump_function(function, args, {})
    if isinstance(content, bytes):
        return content
    with content:
        content.seek(0)
        return content.read()


def _arrow_types(outputs: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
    from pyspark.sql.pandas.types import to_arrow_type

    is_asked = "timezone" in signature(to_arrow_type).parameters  # from PySpark 4.3 on
    zone: dict[str, Any] = {"timezone": "UTC"} if is_asked else {}
    return tuple((field.name, to_arrow_type(field.dataType, **zone)) for field in outputs)


def _schema(df: DataFrame, kept: Sequence[str], outputs: Sequence[Any], added: Sequence[str]) -> Any:
    from pyspark.sql.types import StringType, StructField, StructType

    errors = [StructField(name, StringType()) for name in added[len(outputs) :]]
    return StructType([*(df.schema[name] for name in kept), *outputs, *errors])
