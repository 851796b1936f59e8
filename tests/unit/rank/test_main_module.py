"""Which names a rank's ``__main__`` gets; whole runs are in ``tests/test_main_module.py``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distributor.rank import main_module
from distributor.shipping import pickling

SOURCE = """
import dataclasses
import functools

WIDTH = 3

@dataclasses.dataclass
class Config:
    width: int = 0

class Trainer:
    @staticmethod
    def train():
        return helper(WIDTH)

    def fit(self, config):
        return helper(config.width)

def helper(value):
    return value + 1

def train(config=None):
    class Inner:
        pass
    return helper(WIDTH), Inner

@functools.lru_cache
def cached():
    return helper(WIDTH)

logged = log(train)
"""


def log(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of an installed package, whose wrapper has the globals of its module."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Anything:
    """Has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self) -> None: ...


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ``__main__`` of a notebook."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    vars(main)["log"] = log
    exec(SOURCE, vars(main))
    return main


@pytest.fixture
def names(tmp_path: Path) -> Callable[..., set[str]]:
    def names(function: Any, *args: Any) -> set[str]:
        pickled = pickling.dump_function(function, args, {})
        assert isinstance(pickled, bytes)
        Path(tmp_path, "call").write_bytes(pickled)
        return main_module.names_in(str(tmp_path / "call")).keys() | set()

    return names


def test_names_come_with_the_function(user: Any, names: Any) -> None:
    assert {"train", "helper", "WIDTH"} <= names(user.train)
    assert {"train", "helper"} <= names(functools.partial(user.train, None))
    assert {"Trainer", "helper"} <= names(user.Trainer().fit)
    assert {"Trainer", "helper", "WIDTH"} <= names(user.Trainer.train)


def test_names_come_with_what_wraps_or_holds_the_function(user: Any, names: Any) -> None:
    assert {"train", "helper", "WIDTH"} <= names(user.logged)
    assert {"cached", "helper", "WIDTH"} <= names(user.cached)
    assert {"train", "helper", "WIDTH"} <= names(map, user.train, [None])
    assert {"train", "helper", "WIDTH"} <= names(Anything(), user.train)


def test_the_class_of_an_argument_has_its_name(user: Any, names: Any) -> None:
    assert {"Config", "train"} <= names(user.train, user.Config(3))


def test_what_is_defined_inside_a_function_has_no_name(user: Any, names: Any) -> None:
    assert not {name for name in names(user.train) if "." in name or name == "Inner"}
