"""Modules of which only a part has travelled."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from distributor.rank.sent_modules import Sent, find_last


@pytest.fixture
def send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lets this process find modules; ``here`` is a package that is really there, with a module ``real``."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "real.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(cloudpickle.cloudpickle, "_PICKLE_BY_VALUE_MODULES", set())
    before = {*sys.modules}
    yield lambda **sent: find_last({name.replace("__", "."): held for name, held in sent.items()})
    for name in sys.modules.keys() - before:
        del sys.modules[name]


def test_a_part_has_the_variables_of_its_functions(send: Callable[..., None]) -> None:
    held = {"__name__": "sent.part", "LR": 1}
    send(sent__part=Sent([held], {"Net": int}))
    part = importlib.import_module("sent.part")
    assert (part.LR, part.Net) == (1, int)
    part.LR = 2
    assert held["LR"] == 2
    held["LR"] = 3
    assert part.LR == 3
    assert not hasattr(part, "__file__")
    with pytest.raises(AttributeError, match=r"module 'sent\.part' has no attribute 'absent'"):
        _ = part.absent
    with pytest.raises(ImportError, match=r"cannot import name 'absent' from 'sent\.part'"):
        exec("from sent.part import absent")
    assert "sent.part" in cloudpickle.list_registry_pickle_by_value()


def test_what_is_really_there_comes_first(send: Callable[..., None]) -> None:
    send(here__real=Sent(), here__sent=Sent([{"VALUE": 2}]), json=Sent())
    assert importlib.import_module("here.real").VALUE == 1
    assert importlib.import_module("here.sent").VALUE == 2
    assert importlib.import_module("json").dumps(1) == "1"
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'here\.other'"):
        importlib.import_module("here.other")


def test_a_module_that_has_travelled_whole_is_itself(send: Callable[..., None]) -> None:
    whole = ModuleType("whole")
    send(whole=Sent(whole=whole))
    assert importlib.import_module("whole") is whole
