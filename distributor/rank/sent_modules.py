"""Finds modules of the user that have travelled by value, in whole or in part, where nothing else finds them.

``pickle``, ``torch.save``, process pools and ``torch.compile`` import the module of a class or function by its name.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from distributor.shipping import pickling


@dataclass
class Sent:
    """What has travelled of a module."""

    held: list[dict[str, Any]] = field(default_factory=list)  # the globals of its functions, mostly one dictionary
    defined: dict[str, Any] = field(default_factory=dict)  # functions and classes by their own names
    whole: ModuleType | None = None


class SentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last of all finders."""

    def __init__(self, sent: Mapping[str, Sent]) -> None:
        self._sent = sent

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_package = any(other.startswith(f"{name}.") for other in self._sent)
        return ModuleSpec(name, self, is_package=is_package) if is_package or name in self._sent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if (sent := self._sent.get(spec.name)) is None:
            return None  # an empty package
        return sent.whole or _PartOfModule(spec.name, sent)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self._sent:  # other processes than this rank cannot import it
            pickling.keep_by_value(module)


class _PartOfModule(ModuleType):
    """A module whose variables are those of the functions that have travelled."""

    def __init__(self, name: str, sent: Sent) -> None:
        super().__init__(name)
        self.__sent__ = sent

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for names in (*self.__sent__.held, self.__sent__.defined):
                if name in names:
                    return names[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
            return
        for names in self.__sent__.held or [self.__sent__.defined]:
            names[name] = value


def find_last(sent: Mapping[str, Sent]) -> None:
    """Let this process find the modules."""
    if sent:
        sys.meta_path.append(SentModules(sent))
