"""What a rank does once a module is imported."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from distributor.machine.imports import on_import


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
