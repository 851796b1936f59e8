"""What a rank notes when it has imported a module that takes long."""

from __future__ import annotations

import importlib
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distributor.rank import slow_import

NAME = "takes_long"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that reads an environment variable and the current directory, in place of ``torch._dynamo``."""
    (tmp_path / f"{NAME}.py").write_text("import os\nread = os.environ.get('READ'), os.getcwd()\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(slow_import, "_MODULE", NAME)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("READ", "")  # which is undone after the test
    monkeypatch.delenv("READ")
    monkeypatch.chdir("/")


def set_variable() -> None:
    os.environ["READ"] = "1"


@pytest.mark.parametrize(
    ("change", "noted"),
    [(lambda: None, [0, 1]), (set_variable, [0, 0]), (lambda: os.chdir("/usr"), [0, 0])],
    ids=["nothing", "variable", "directory"],
)
def test_an_import_is_noted_if_nothing_has_changed_what_it_reads(change: Callable[[], None], noted: list[int]) -> None:
    imported = mmap.mmap(-1, 2)
    slow_import.watch(imported, 1)
    change()
    importlib.import_module(NAME)
    assert list(imported[:]) == noted
    assert not slow_import.by_all(imported)


def test_the_import_of_a_fork_is_not_noted() -> None:
    imported = mmap.mmap(-1, 1)
    slow_import.watch(imported, 0)
    pid = os.fork()
    if pid == 0:
        importlib.import_module(NAME)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not slow_import.by_all(imported)
    importlib.import_module(NAME)
    assert slow_import.by_all(imported)


def test_an_import_in_a_folder_that_is_gone_is_not_noted(tmp_path: Path) -> None:
    imported = mmap.mmap(-1, 1)
    slow_import.watch(imported, 0)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError):
        importlib.import_module(NAME)  # the module's own error, not one of the note
    assert not slow_import.by_all(imported)


def test_the_import_is_repeated_as_a_rank_would_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, path = dict(os.environ), [*sys.path]
    monkeypatch.setattr(sys, "path", [entry for entry in path if entry != str(tmp_path)])
    before = [*sys.path]
    try:
        slow_import.repeat({"READ": "2"}, "/usr", path)
        assert sys.modules[NAME].read == ("2", "/usr")
        assert (os.getcwd(), sys.path, dict(os.environ)) == ("/", before, {"READ": "2"})
    finally:
        os.environ.clear()
        os.environ.update(kept)
