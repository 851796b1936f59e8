"""The tables that are no Spark DataFrames: their columns' types as Spark names them, and their rows."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from distributor.errors import ConfigurationError

_NAMES = {"bool": "boolean", "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint",
          "uint8": "uint8", "float": "float", "double": "double", "string": "string", "large_string": "string",
          "binary": "binary", "large_binary": "binary", "date32[day]": "date", "date64[ms]": "date"}  # fmt: skip

_ROWS = 1 << 16  # of a batch of a table in memory


@dataclass(frozen=True)
class LocalTable:
    """Rows in memory or in Parquet files."""

    types: Mapping[str, str]
    batches: Callable[[Sequence[str]], Iterable[Any]]  # of pyarrow, with at least these columns


def open_table(source: Any) -> LocalTable:
    """Return a pandas DataFrame, a ``pyarrow.Table`` or Parquet files as a table.

    Raises:
        ConfigurationError: it is none of these, there are no such files, or two columns have one name.
    """
    import pyarrow as pa

    if isinstance(source, str):
        return _parquet(source)
    if type(source).__module__.partition(".")[0] == "pandas":
        _check_unique([str(each) for each in source.columns], "the DataFrame")
        source = pa.Table.from_pandas(source, preserve_index=False)
    if not isinstance(source, pa.Table):
        raise ConfigurationError(
            "Data: the source must be a Spark or pandas DataFrame, a pyarrow.Table, the path of Parquet files or the "
            f"folder of a snapshot, not {type(source).__name__}"
        )
    return LocalTable(_types(source.schema, "the table"), lambda names: source.to_batches(_ROWS))


def _parquet(pattern: str) -> LocalTable:
    import pyarrow.parquet as pq

    files = _files(pattern) or _files(f"{glob.escape(pattern)}/**/*.parquet")
    if not files:
        raise ConfigurationError(f"Data: there is no snapshot and no Parquet file at {pattern!r}")
    with _named(files[0]):
        types = _types(pq.read_schema(files[0]), f"the file {files[0]!r}")
    return LocalTable(types, lambda names: _row_groups(files, {name: types[name] for name in names}))


def _files(pattern: str) -> list[str]:
    """Return Parquet files without those that Spark hides, such as in ``_temporary``, unless the pattern names them."""
    hidden = re.compile(r"\.|_[^=]*$")
    named = [part for part in pattern.split("/") if hidden.match(part)]
    return [
        name
        for name in sorted(glob.glob(pattern, recursive=True))
        if name.endswith(".parquet")
        and not os.path.isdir(name)  # a link to nothing is an error when it is read
        and all(any(fnmatchcase(part, each) for each in named) for part in name.split("/") if hidden.match(part))
    ]


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Name a file that cannot be read, which would look like one that cannot be written."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(f"the Parquet file {path!r} cannot be read: {error}") from None


def _row_groups(files: list[str], types: Mapping[str, str]) -> Iterator[Any]:
    """Yield batches, one row group after the other: ``Dataset.to_batches`` reads far ahead, and needs much memory."""
    import pyarrow.parquet as pq

    for path in files:
        with _named(path), pq.ParquetFile(path) as file:
            there = _types(file.schema_arrow, f"the file {path!r}")
            for name, kind in types.items():
                if there.get(name) != kind:
                    raise ConfigurationError(
                        f"Data: column {name!r} is {kind} in {files[0]!r} but {there.get(name, 'missing')} in {path!r}"
                        ": write all files with the same columns, or leave it out with columns=[...]"
                    )
            for group in range(file.num_row_groups):
                yield from file.read_row_group(group).to_batches()


def _types(schema: Any, place: str) -> dict[str, str]:
    _check_unique(schema.names, place)
    return {each.name: _name_of(each.type) for each in schema}


def _check_unique(names: Sequence[str], place: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"Data: {place} has two columns {twice!r}: rename one")


def _name_of(kind: Any) -> str:
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"array<{_name_of(kind.value_type)}>"
    if pa.types.is_dictionary(kind):
        return _name_of(kind.value_type)
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return "decimal" if pa.types.is_decimal(kind) else _NAMES.get(str(kind), str(kind))
