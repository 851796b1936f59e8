"""What a rank does once a module is imported."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from distributor.machine.imports import around_import, on_import, uncollected


@pytest.mark.parametrize("zipped", [False, True])
def test_a_module_is_told_apart_from_others_of_its_loader(
    zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All modules of a zip have one loader, as PySpark's in Spark's workers."""
    names = ["hooked_first", "hooked_then"]
    if zipped:
        with zipfile.ZipFile(tmp_path / "modules.zip", "w") as archive:
            for name in names:
                archive.writestr(f"{name}.py", "")
    else:
        for name in names:
            (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "modules.zip" if zipped else tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    told: list[ModuleType] = []
    for name in reversed(names):
        on_import(name, told.append)
    imported = [importlib.import_module(name) for name in names]
    for name in names:
        del sys.modules[name]
    assert told == imported


def test_a_module_that_was_only_looked_for_is_told_once_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Transformers looks for MLflow: ``importlib.util.find_spec("mlflow") is not None``."""
    (tmp_path / "looked_for.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    told: list[ModuleType] = []
    on_import("looked_for", told.append)
    on_import("looked_for", told.append)
    assert importlib.util.find_spec("looked_for") is not None
    imported = importlib.import_module("looked_for")
    importlib.reload(imported)
    del sys.modules["looked_for"]
    assert told == [imported] * 2


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_before_after_a_quick_import(
    is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quickly.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    (tmp_path / "broken.py").write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("quickly", "broken"):
        around_import(name, lambda _: uncollected())
    try:
        if not is_on:
            gc.disable()
        assert not importlib.import_module("quickly").COLLECTS
        with pytest.raises(ValueError, match="broken"):
            importlib.import_module("broken")
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
        del sys.modules["quickly"]
