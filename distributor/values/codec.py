"""The one codec: a dataclass as plain values for JSON, and back, with each value checked against its annotation.

Floats from a message are finite. Other bounds are written into annotations: ``Annotated[int, Between(1, 65535)]``, or
one of the types below. This module is pickled by value for Spark's workers: it imports only what they have.
"""

import dataclasses
import json
import math
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Between:
    """Bounds of a number, both included."""

    least: float
    most: float

    def check(self, value: float) -> None:
        if not self.least <= value <= self.most:
            raise ValueError(f"{value} is not from {self.least} to {self.most}")


@dataclass(frozen=True)
class Length:
    """The maximum number of characters of a text, or of entries."""

    most: int

    def check(self, value: typing.Sized) -> None:
        if len(value) > self.most:
            raise ValueError(f"the length {len(value)} is more than {self.most}")


Count = Annotated[int, Between(0, 2**63 - 1)]
Name = Annotated[str, Length(512)]
Path = Annotated[str, Length(4096)]
Text = Annotated[str, Length(16 << 10)]
Seconds = Annotated[float, Between(0.0, float("inf"))]
Port = Annotated[int, Between(1, 65535)]

Reader = Callable[[Any], Any]


class _Readers(dict[Any, Reader]):
    """What :func:`_reader` has made; empty again after pickling."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Readers, ()


_readers = _Readers()


def plain(value: Any) -> Any:
    """Return a value with its dataclasses as dicts and its tuples as lists.

    ``dataclasses.asdict`` finds no fields in a class that PySpark 3.5's cloudpickle pickled by value.
    """
    if hasattr(type(value), "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in type(value).__dataclass_fields__}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def build(kind: Any, value: Any) -> Any:
    """Return a plain value as the dataclass, or the type of an annotation, ``kind``; ValueError if it is none.

    >>> build(tuple[Port, ...], [80])
    (80,)
    """
    return _reader_of(kind)(value)


def pack(value: Any) -> bytes:
    """Return a dataclass as JSON.

    >>> pack(Length(3)), read(Length, b'{"most": 3}')
    (b'{"most": 3}', Length(most=3))
    """
    return json.dumps(plain(value)).encode()


def read(kind: type[T], data: bytes | str) -> T:
    """Return what :func:`pack` has packed; ValueError if it is something else."""
    try:
        return typing.cast(T, build(kind, json.loads(data)))
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _reader_of(hint: Any) -> Reader:
    reader = _readers.get(hint)
    if reader is None:
        reader = _readers[hint] = _reader(hint)
    return reader


def _reader(hint: Any) -> Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        return _bounded(hint.__origin__, hint.__metadata__)
    if origin in (types.UnionType, typing.Union):
        return _union(hint, arguments)
    if origin is typing.Literal:
        return lambda value: value if value in arguments else _refuse(value, hint)
    if origin is tuple:
        return _tuple(hint, arguments)
    if origin is Mapping or origin is dict:
        return _mapping(hint, *arguments)
    if dataclasses.is_dataclass(hint):
        return _record(hint)
    if hint is float:
        return _float
    return lambda value: (
        value if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)) else _refuse(value, hint)
    )


def _refuse(value: Any, hint: Any) -> Any:
    raise ValueError(f"{reprlib.repr(value)} is not of type {getattr(hint, '__name__', hint)}")


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(value, float)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{reprlib.repr(value)} is not finite")
    return number


def _bounded(hint: Any, bounds: tuple[Any, ...]) -> Reader:
    reader = _reader_of(hint)

    def read_bounded(value: Any) -> Any:
        value = reader(value)
        for bound in bounds:
            bound.check(value)
        return value

    return read_bounded


def _union(hint: Any, arguments: tuple[Any, ...]) -> Reader:
    readers = [_reader_of(one) for one in arguments if one is not types.NoneType]

    def read_union(value: Any) -> Any:
        if value is None and len(readers) < len(arguments):
            return None
        for reader in readers[:-1]:
            try:
                return reader(value)
            except ValueError:
                pass
        return readers[-1](value)

    return read_union


def _tuple(hint: Any, arguments: tuple[Any, ...]) -> Reader:
    readers = [_reader_of(one) for one in arguments if one is not Ellipsis]

    def read_tuple(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            if arguments[-1] is Ellipsis:
                return tuple(map(readers[0], value))
            if len(readers) == len(value):
                return tuple(reader(entry) for reader, entry in zip(readers, value))
        return _refuse(value, hint)

    return read_tuple


def _mapping(hint: Any, key: Any, entry: Any) -> Reader:
    read_key = int if key is int else _reader_of(key)  # JSON has only texts as keys
    read_entry = _reader_of(entry)

    def read_mapping(value: Any) -> Any:
        if not isinstance(value, dict):
            _refuse(value, hint)
        return {read_key(name): read_entry(item) for name, item in value.items()}

    return read_mapping


def _record(kind: Any) -> Reader:
    hints = {field.name: field.type for field in kind.__dataclass_fields__.values()}
    if any(isinstance(hint, str) for hint in hints.values()):
        hints = typing.get_type_hints(kind, include_extras=True)
    readers = {name: _reader_of(hint) for name, hint in hints.items()}

    def read_record(value: Any) -> Any:
        if not isinstance(value, dict):
            _refuse(value, kind)
        fields = {}
        for name, entry in value.items():
            try:
                fields[name] = readers[name](entry)
            except KeyError:
                raise ValueError(f"{kind.__name__} has no field {reprlib.repr(name)}") from None
            except ValueError as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        try:
            return kind(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from None

    return read_record
