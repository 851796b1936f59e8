"""Tells whether two functions do the same: by their code and the values that they use, not by where they were written.

A cell of a notebook that is run again makes another function, whose pickle differs in line numbers and in identities.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _BUILTIN_TYPE_NAMES, _extract_code_globals, _should_pickle_by_reference

from distributor.shipping import modules
from distributor.shipping.pickling import _DISPATCHING, _Pickler, pickled_by_value, registry_lock

#: What Python adds to a class.
_OF_PYTHON = {
    "__dict__",
    "__weakref__",
    "__module__",
    "__doc__",
    "__firstlineno__",
    "__static_attributes__",
    "_abc_impl",
}


def fingerprint(*values: Any) -> str:
    """Return a digest that is the same for functions, classes and values that are written and made of the same.

    Raises:
        Exception: a value cannot be pickled.
    """
    with pickled_by_value(cloudpickle, modules.own_modules(), registry_lock):
        try:
            return _Digest(fast=True).of(values)
        except (ValueError, RecursionError):  # a container that contains itself
            return _Digest(fast=False).of(values)


class _Digest(_Pickler):
    def __init__(self, *, fast: bool) -> None:
        self._hash = hashlib.sha256()
        super().__init__(self, protocol=5, buffer_callback=lambda each: self._hash.update(each.raw()))
        self.fast = fast  # without references to what came before, which tell equal objects from identical ones
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, values: Any) -> str:
        self.dump(values)
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return memoryview(data).nbytes

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (set, frozenset)):
            return _made, (type(obj).__name__, sorted(_Digest(fast=True).of(each) for each in obj))
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.TypedStorage and obj._untyped_storage.device.type == "cpu":
            untyped = obj._untyped_storage
            memory = (ctypes.c_char * untyped.nbytes()).from_address(untyped.data_ptr()) if untyped.nbytes() else b""
            return _made, (str(obj.dtype), hashlib.sha256(memory).digest())
        is_named = not isinstance(obj, (FunctionType, ModuleType, type)) or obj in _BUILTIN_TYPE_NAMES
        by_value = not is_named and not _should_pickle_by_reference(obj)
        if isinstance(obj, CodeType):
            return _made, ("code", _parts(obj))
        if by_value and getattr(obj, "__code__", None) is _DISPATCHING:
            return _made, (obj.__wrapped__, dict(obj.registry))
        if not by_value:
            return super().reducer_override(obj)
        if id(obj) in self._seen:
            return _made, ("seen", self._seen[id(obj)][0])
        self._seen[id(obj)] = len(self._seen), obj
        if isinstance(obj, ModuleType):
            return _made, _module(obj)
        return _made, (_function(obj) if isinstance(obj, FunctionType) else _class(obj))


def _made(*_: Any) -> None:
    """Stands for what makes an object."""


def _parts(code: CodeType) -> tuple[Any, ...]:
    """Return what code does, without where it was written."""
    return (
        code.co_code,
        getattr(code, "co_exceptiontable", b""),  # what is within a try statement, from Python 3.11 on
        code.co_consts,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
    )


def _function(function: FunctionType) -> tuple[Any, ...]:
    cells: list[Any] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            cells.append(cell.cell_contents)
    names = sorted(name for name in _extract_code_globals(function.__code__) if name in function.__globals__)
    used = [(name, function.__globals__[name]) for name in names]
    return _parts(function.__code__), function.__defaults__, function.__kwdefaults__, cells, used, vars(function)


def _module(module: ModuleType) -> tuple[Any, ...]:
    return module.__name__, {name: value for name, value in vars(module).items() if not name.startswith("__")}


def _class(kind: type) -> tuple[Any, ...]:
    members = [(name, vars(kind)[name]) for name in sorted(vars(kind)) if name not in _OF_PYTHON]
    return kind.__name__, kind.__bases__, members
