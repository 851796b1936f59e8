"""Pickles functions, values and exceptions. Only :mod:`.fingerprint` also uses the ``cloudpickle`` package.

The user's own modules are pickled *by value*, because executors have no copy of them; installed packages are pickled by
reference.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import importlib
import io
import json
import mmap
import os
import pickle
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any, BinaryIO, Literal, cast

import cloudpickle
from cloudpickle.cloudpickle import (
    _DYNAMIC_CLASS_TRACKER_BY_ID,
    _extract_code_globals,
    _is_registered_pickle_by_value,
    _lookup_module_and_qualname,
    _make_function,
    _make_skeleton_class,
    _should_pickle_by_reference,
)

from distributor.errors import PayloadError, ResultError
from distributor.shipping import modules
from distributor.shipping.guarded import guarded
from distributor.shipping.spark_objects import DRIVER_ONLY, SparkObjectError, refused
from distributor.text.wording import size

_PROTOCOL = 5

# Seconds without progress after which the driver gives up unpickling.
_VALUE_PATIENCE = 60.0
_EXCEPTION_PATIENCE = 10.0

_MOST_LINKED = 32  # exceptions that travel with one that they caused

_LARGE_STORAGE = 64 << 10  # bytes from which tensors are pickled from memory; torch copies them three times

_LARGE_CALL = 1 << 20  # bytes from which a pickled call is kept in a file
_ALIGNED = 64  # bytes at multiples of which arrays begin: a cache line, and what vector instructions need

# What functools makes of a function, which pickle takes for something that every process can import.
_CACHED = type(functools.lru_cache(lambda: None))
_DISPATCHING = cast(FunctionType, functools.singledispatch(lambda _: None)).__code__

registry_lock = threading.RLock()  # guards cloudpickle's registry, which all threads share

#: Of the calls that this process has unpickled.
functions_by_value: list[FunctionType] = []
modules_by_value: list[ModuleType] = []


def dump_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], by_value: bool = True
) -> bytes | IO[bytes]:
    """Pickle a call for the ranks, with the user's own modules if ``by_value``: ranks may be unable to import them.

    A large call is a file without a name. PayloadError names the variable or argument at fault if one is found.
    """
    content = _CallContent()
    registered = pickled_by_value(cloudpickle, modules.own_modules(), registry_lock) if by_value else nullcontext()
    with registered:
        try:
            _CallPickler(content, _PROTOCOL, content.add_buffer).dump((function, tuple(args), dict(kwargs)))
            return content.finish()
        except _NoSpaceError as error:
            raise PayloadError(f"{name_of(function)} cannot be pickled for the ranks: {error}") from error
        except (Exception, SystemExit) as error:
            raise PayloadError(_why_not(function, args, kwargs, error)) from error


def _why_not(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], raised: BaseException
) -> str:
    """Return why a call cannot be pickled, and what to do. ``raised`` is what pickling the call has raised."""
    text = f"{name_of(function)} cannot be pickled for the ranks"
    label, value, error = _find_culprit(function, args, kwargs) or ("", None, raised)
    is_sparks = type(value).__module__.startswith(("pyspark.", "py4j."))
    if isinstance(error, SparkObjectError):
        inner = f"{type(error.value).__module__}.{type(error.value).__qualname__}"
        if not label:
            return f"{text}: a {inner} that it uses {error.refusal.why}. {error.refusal.instead}"
        which = "it" if is_sparks else f"the {inner} in it"
        return f"{text}: {label}, since {which} {error.refusal.why}. {error.refusal.instead}"
    if type(getattr(value, "__self__", value)).__module__.startswith(("IPython.", "ipykernel.", "google.colab.")):
        return f"{text}: {label}, since it exists only in the notebook. Use it there, and pass what it returns"
    if is_sparks:
        return f"{text}: {label}, since it {DRIVER_ONLY.why}. {DRIVER_ONLY.instead}"
    return (
        text
        + (f": {label}" if label else "")
        + f" ({_one_line(error)}). Create such objects inside the function, or pass data to create them from."
    )


def _dumps(value: Any, pickler: type[_Pickler]) -> bytes:
    file = io.BytesIO()
    pickler(file, protocol=_PROTOCOL).dump(value)
    return file.getvalue()


class _NoSpaceError(Exception):
    """The temporary folder cannot hold a pickled call."""


class _CallContent:
    """A pickled call as it is written: the pickle in pieces, with arrays between them, then an index, then its length.

    So arrays are copied once, and ranks can map them.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] = io.BytesIO()
        self._end = 0
        self._index: dict[Literal["pickle", "buffers"], list[tuple[int, int]]] = {"pickle": [], "buffers": []}

    def write(self, data: Any) -> int:
        """Add a piece of the pickle."""
        pieces, start, count = self._index["pickle"], self._end, self._append(data)
        if pieces and sum(pieces[-1]) == start:
            start, before = pieces.pop()
            count += before
        pieces.append((start, count))
        return count

    def add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        """Add the memory of an array that the pickle leaves out."""
        self._append(bytes(-self._end % _ALIGNED))
        self._index["buffers"].append((self._end, self._append(buffer.raw())))

    def finish(self) -> bytes | IO[bytes]:
        index = json.dumps(self._index).encode()
        self._append(index + struct.pack("!Q", len(index)))
        return self._file.getvalue() if isinstance(self._file, io.BytesIO) else self._file

    def _append(self, data: Any) -> int:
        count = memoryview(data).nbytes
        try:
            if self._end + count > _LARGE_CALL and isinstance(self._file, io.BytesIO):
                kept, self._file = self._file, tempfile.TemporaryFile()
                self._file.write(kept.getbuffer())
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise _NoSpaceError(
                f"it takes more than {size(self._end)}, which is all that the temporary folder {tempfile.gettempdir()} "
                f"takes ({error.strerror}). Load large data inside the function, or set TMPDIR to a larger folder "
                "before Python starts"
            ) from error
        self._end += count
        return count


def load_function(path: str | os.PathLike[str]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Inside a rank, unpickle the call that :func:`dump_function` pickled, from a file.

    Arrays stay in the file, which is mapped: what the rank writes into them is its own.
    """
    with open(path, "rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    (length,) = struct.unpack("!Q", memory[-8:])
    index = json.loads(bytes(memory[-8 - length : -8]))
    pieces, buffers = ([memory[at : at + count] for at, count in index[kind]] for kind in ("pickle", "buffers"))
    function, args, kwargs = pickle.load(io.BufferedReader(_ChunkReader(pieces), 1 << 20), buffers=buffers)
    return function, args, kwargs


def classes_by_value() -> list[type]:
    """Return the classes that this process has unpickled by value, and that still exist."""
    return [each for each in list(_DYNAMIC_CLASS_TRACKER_BY_ID.values()) if isinstance(each, type)]


def name_of(function: Callable[..., Any]) -> str:
    """Return a callable's name for messages: of a partial, its function's; of an instance, its class's."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def dump_value(value: Any, file: BinaryIO) -> None:
    """Pickle a return value piece by piece, tensors from the CPU: the driver may not have the rank's device."""
    _ValuePickler(file, protocol=_PROTOCOL).dump(value)


def dump_exception(error: BaseException) -> bytes | None:
    """Return the pickled exception with those that caused it.

    One that cannot be pickled, or not be unpickled, loses the attributes that cannot travel. If its class is in the
    way, it becomes the nearest base class that is not, with its text.
    """
    with suppress(Exception):
        return _dump_chain(error, set())
    return None


def _dump_chain(error: BaseException, seen: set[int]) -> bytes:
    """Pickle an exception with its ``__cause__`` and ``__context__``, which pickle leaves out."""
    seen.add(id(error))
    linked = [
        None if link is None or id(link) in seen or len(seen) >= _MOST_LINKED else _dump_chain(link, seen)
        for link in (error.__cause__, error.__context__)
    ]
    alone = _dump_alone(error, seen)
    if linked == [None, None]:
        return alone
    return pickle.dumps(_Link(alone, linked[0], linked[1], error.__suppress_context__))


def _dump_alone(error: BaseException, seen: set[int]) -> bytes:
    with suppress(Exception):
        pickled = _dumps(error, _Pickler)
        if not isinstance(error, BaseExceptionGroup):  # whose members have causes
            pickle.loads(pickled)  # fails if the exception's ``__init__`` takes arguments other than ``args``
            return pickled
    attributes = {name: value for name, value in vars(error).items() if _loads(value)}
    args = tuple(value if _loads(value) else repr(value) for value in error.args)
    if isinstance(error, BaseExceptionGroup):
        args = (error.message, tuple(_Link(_dump_chain(member, seen)) for member in error.exceptions))
    for kind in type(error).__mro__:
        with suppress(Exception):
            pickled = _dumps(_Remade(kind, args if kind is type(error) else (str(error),), attributes), _Pickler)
            str(pickle.loads(pickled))
            return pickled
    raise TypeError(f"{type(error)} cannot be pickled")


def _loads(value: Any) -> bool:
    with suppress(Exception):
        pickle.loads(_dumps(value, _Pickler))
        return True
    return False


#: Sets an attribute of an exception whose class refuses that, such as a frozen dataclass.
_set = BaseException.__setattr__


class _Link:
    """Becomes an exception with those that caused it as it is unpickled."""

    def __init__(
        self, alone: bytes, cause: bytes | None = None, context: bytes | None = None, suppressed: bool = False
    ) -> None:
        self._arguments = alone, cause, context, suppressed

    def __reduce__(self) -> Any:
        return _linked, self._arguments


def _linked(alone: bytes, cause: bytes | None, context: bytes | None, suppressed: bool) -> BaseException:
    error: BaseException = pickle.loads(alone)
    if context is not None:
        _set(error, "__context__", pickle.loads(context))
    if cause is not None:
        _set(error, "__cause__", pickle.loads(cause))
    if suppressed:
        _set(error, "__suppress_context__", True)
    return error


class _Remade:
    """Becomes an exception as it is unpickled, without a call of its ``__init__``."""

    def __init__(self, kind: type, args: tuple[Any, ...], attributes: Mapping[str, Any]) -> None:
        self._arguments = kind, args, attributes

    def __reduce__(self) -> Any:
        return _remade, self._arguments


def _remade(kind: type[BaseException], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> BaseException:
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    error: BaseException = builtin.__new__(kind, *args)
    _set(error, "args", args)
    vars(error).update(attributes)
    return error


def load_exception(pickled: bytes | None) -> BaseException | None:
    """Unpickle an exception on the driver; ``None`` if that fails or makes no progress."""
    if pickled is None:
        return None
    try:
        loaded = guarded(functools.partial(pickle.loads, pickled), _EXCEPTION_PATIENCE)
    except BaseException:  # user code, which may also try to exit
        return None
    return loaded if isinstance(loaded, BaseException) else None


def load_value(chunks: Sequence[bytes | memoryview], rank: int) -> Any:
    """Unpickle a rank's return value from the pieces in which it arrived; ResultError if that fails or stalls."""
    reader = _ChunkReader(chunks)

    def load() -> tuple[Any, BaseException | None, str]:
        try:
            return pickle.load(io.BufferedReader(reader, buffer_size=1 << 20)), None, ""
        except BaseException as error:  # user code, which may also try to exit
            return None, error, _one_line(error)

    try:
        value, error, reason = guarded(load, _VALUE_PATIENCE, lambda: reader.position)
    except TimeoutError as late:
        error, reason = late, str(late)
    if error is not None:
        raise ResultError(
            f"the return value of rank {rank} cannot be unpickled on the driver: {reason.rstrip('.')}. "
            "Return plain data (numbers, strings, a state dict; model.module.state_dict() for a "
            "DistributedDataParallel), or install on the driver the packages that the value needs"
        ) from error
    return value


def _is_special(obj: Any) -> bool:
    """Return whether an object is an importable module with a class other than ``ModuleType``."""
    return isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    """Names the file of all code, which cloudpickle 3.1.3 replaces by ``<dynamic-code>``.

    Tracebacks, ``inspect.getsource`` and ``torch.jit.script`` need the file.
    """

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is CodeType:
            return _code, (obj.co_filename, *self.dispatch_table[CodeType](obj))
        if kind is _CACHED and not _can_be_imported(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if kind is functools.cached_property:  # has a lock in Python 3.11
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.TypedStorage:
            storage = obj._untyped_storage
            if storage.device.type == "cpu" and storage.nbytes() >= _LARGE_STORAGE:
                memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
                return _storage, (pickle.PickleBuffer(memory), obj.dtype)
        if kind is FunctionType and obj.__code__ is _DISPATCHING and not _can_be_imported(obj):
            return functools.singledispatch, (obj.__wrapped__,), dict(obj.registry), None, None, _register
        reduced = super().reducer_override(obj)
        is_class = isinstance(reduced, tuple) and reduced[0] is _make_skeleton_class
        if is_class and "__slots__" in vars(obj) and tuple not in obj.__bases__:  # a NamedTuple refuses any slots
            made, name, bases, namespace, *rest = reduced[1]  # without slots, instances would have another layout
            return reduced[0], (made, name, bases, {**namespace, "__slots__": obj.__slots__}, *rest), *reduced[2:]
        return reduced


def _can_be_imported(obj: Any) -> bool:
    """Whether ranks find a function by its name, as one of an installed package."""
    found = _lookup_module_and_qualname(obj)
    return found is not None and not _is_registered_pickle_by_value(found[0])


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _register(dispatching: Any, registry: Mapping[type, Callable[..., Any]]) -> None:
    for kind, function in registry.items():
        dispatching.register(kind, function)


def _code(filename: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


def _fill(module: ModuleType, held: Mapping[str, Any]) -> None:
    vars(module).update(held, __builtins__=vars(builtins))
    modules_by_value.append(module)


def _function(*arguments: Any) -> FunctionType:
    function: FunctionType = _make_function(*arguments)
    functions_by_value.append(function)
    return function


class _CallPickler(_Pickler):
    def __init__(
        self, file: Any, protocol: int, buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None
    ) -> None:
        super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)
        self._refusals = refused()
        self._refused = tuple(self._refusals)

    def reducer_override(self, obj: Any) -> Any:
        if issubclass(type(obj), self._refused):  # isinstance would ask the object's own __class__
            raise SparkObjectError(
                obj, next(self._refusals[kind] for kind in type(obj).__mro__ if kind in self._refusals)
            )
        # Torch's backends are modules with classes of their own, which cloudpickle does not recognize as modules.
        if _is_special(obj) and obj.__name__ not in cloudpickle.list_registry_pickle_by_value():
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, ModuleType) and not _should_pickle_by_reference(obj):  # cloudpickle's must not be circular
            held = {name: value for name, value in vars(obj).items() if name != "__builtins__"}
            return ModuleType, (obj.__name__,), held, None, None, _fill
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and reduced[0] is _make_function:
            return _function, *reduced[1:]
        return reduced


class _ValuePickler(_Pickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.cpu().__reduce_ex__(_PROTOCOL)
        return super().reducer_override(obj)


def _storage(content: bytearray | memoryview, dtype: Any) -> Any:
    import torch

    kind: Any = torch.TypedStorage
    storage = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
    return kind(wrap_storage=storage, dtype=dtype, _internal=True)


class _ChunkReader(io.RawIOBase):
    """A readable file over consecutive pieces of bytes, which are not joined in memory."""

    def __init__(self, chunks: Sequence[bytes | memoryview]) -> None:
        self._chunks = chunks
        self._index = 0
        self._offset = 0

    def readable(self) -> bool:
        return True

    @property
    def position(self) -> tuple[int, int]:
        return self._index, self._offset

    def readinto(self, buffer: Any) -> int:
        while self._index < len(self._chunks):
            piece = memoryview(self._chunks[self._index])[self._offset : self._offset + len(buffer)]
            if piece:
                buffer[: len(piece)] = piece
                self._offset += len(piece)
                return len(piece)
            self._index, self._offset = self._index + 1, 0
        return 0


@contextmanager
def pickled_by_value(
    pickler: Any, wanted: Iterable[ModuleType], lock: AbstractContextManager[object]
) -> Iterator[None]:
    """Pickle modules by value inside the ``with`` block. Modules that the user has registered stay registered.

    ``pickler`` is ``cloudpickle`` or PySpark's copy of it, and ``lock`` guards its registry, which all threads share.
    """
    with lock:
        already = pickler.list_registry_pickle_by_value()
        registered: list[ModuleType] = []
        try:
            for module in wanted:
                if module.__name__ not in already:
                    pickler.register_pickle_by_value(module)
                    registered.append(module)
            yield
        finally:
            for module in registered:
                with suppress(ValueError):  # code of the user, in another thread, has unregistered the module
                    pickler.unregister_pickle_by_value(module)


def keep_by_value(module: ModuleType) -> None:
    """Pickle a module by value from now on, in this process."""
    with registry_lock:
        cloudpickle.register_pickle_by_value(module)


def _find_culprit(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], callers: tuple[Any, ...] = ()
) -> tuple[str, Any, BaseException] | None:
    """Return the first part of a call that cannot be pickled: its description, its value, and what pickling raises.

    Of functions that it uses, ``callers`` are being searched already, and others are searched in turn.
    """
    callers = (*callers, function)
    for label, value in sorted(_candidates(function, args, kwargs), key=lambda each: isinstance(each[1], FunctionType)):
        if any(value is caller for caller in callers) or (error := _pickling_error(value)) is None:
            continue
        if isinstance(value, FunctionType):
            if (inner := _find_culprit(value, (), {}, callers)) is None:
                continue
            label, *found = inner
            return label if label.startswith("in ") else f"in {name_of(value)}, {label}", *found
        names = [name for name, held in _attributes(value) if _pickling_error(held) is not None]
        if isinstance(value, ModuleType):
            label += f" is a module of yours, and some of its variables cannot be pickled ({', '.join(names)})"
        else:
            label += f" is a {type(value).__module__}.{type(value).__qualname__}, which cannot be pickled"
            if names and not _should_pickle_by_reference(value if isinstance(value, type) else type(value)):
                label += f" because of its {', '.join(names)}"
        return label, value, error
    return None


def _candidates(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the variables, globals, defaults and arguments of a call, each with its description for an error text."""
    candidates: list[tuple[str, Any]] = []
    inner: Any = function
    while isinstance(inner, functools.partial):
        candidates += [(f"argument {index} of the partial", value) for index, value in enumerate(inner.args, start=1)]
        candidates += [(f"argument '{name}' of the partial", value) for name, value in inner.keywords.items()]
        inner = inner.func
    method = inner
    inner = getattr(method, "__func__", method)
    code = getattr(inner, "__code__", None)
    if code is not None:
        positional = inner.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(positional) : code.co_argcount]
        defaults = {**dict(zip(names, positional)), **(inner.__kwdefaults__ or {})}
        candidates += [(f"the default of its argument '{name}'", value) for name, value in defaults.items()]
        for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=False):
            try:
                candidates.append((f"the variable '{name}' that it uses", cell.cell_contents))
            except ValueError:  # an empty cell
                continue
        candidates += [
            (f"the global '{name}' that it uses", inner.__globals__[name])
            for name in _extract_code_globals(code)
            if name in inner.__globals__
        ]
    else:
        candidates += [(f"its attribute '{name}'", value) for name, value in _attributes(inner)]
        candidates.append(("its method __call__", type(inner).__call__))
    bound_to = getattr(method, "__self__", None)
    if bound_to is not None:
        candidates.append((f"the {type(bound_to).__qualname__} object it is bound to", bound_to))
    candidates += [(f"argument {index}", value) for index, value in enumerate(args, start=1)]
    candidates += [(f"argument '{name}'", value) for name, value in kwargs.items()]
    return candidates


def _attributes(value: Any) -> list[tuple[str, Any]]:
    return [(name, held) for name, held in getattr(value, "__dict__", {}).items() if not name.startswith("__")]


def largest_part(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, int] | None:
    """Return the variable or argument of a call whose pickle is the largest, and that pickle's bytes."""
    sizes = []
    for label, value in _candidates(function, args, kwargs):
        count = _Count()
        with suppress(Exception, SystemExit):
            _CallPickler(count, _PROTOCOL, count.add_buffer).dump(value)
            sizes.append((label, count.total))
    return max(sizes, key=lambda part: part[1], default=None)


def _pickling_error(value: Any) -> BaseException | None:
    try:
        count = _Count()
        _CallPickler(count, _PROTOCOL, count.add_buffer).dump(value)
    except (Exception, SystemExit) as error:
        return error
    return None


class _Count:
    """Counts the bytes of a pickle."""

    total = 0

    def write(self, data: Any) -> int:
        self.total += (count := memoryview(data).nbytes)
        return count

    def add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.write(buffer.raw())


def _one_line(error: BaseException) -> str:
    try:
        text = str(error).strip()
    except Exception:  # the user's class may raise
        text = ""
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
