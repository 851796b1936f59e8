"""Modules are found without being imported, and the user's own are told from installed ones."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

import pytest

from distributor.shipping import modules


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with modules that must not be imported."""
    package = tmp_path / "own_package"
    (package / "inner").mkdir(parents=True)
    for path in (package / "__init__.py", package / "train.py", tmp_path / "own_script.py"):
        path.write_text("raise AssertionError('imported')\n")
    (package / "inner" / "deep.py").touch()  # in a namespace within a package
    (tmp_path / "own_space" / "nested").mkdir(parents=True)
    (tmp_path / "own_space" / "train.py").touch()
    (tmp_path / "own_space" / "nested" / "deep.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("own_script", "own_package", "own_package.train", "own_space.train"),
        *("sys", "json.decoder", "distributor.display.plain", "pytest"),
    ],
)
def test_modules_are_found_without_an_import(project: Path, name: str) -> None:
    before = set(sys.modules)
    spec = modules.find(name)
    assert spec is not None
    assert spec.name == name
    assert {loaded for loaded in set(sys.modules) - before if loaded.startswith("own_")} == set()


@pytest.mark.parametrize("name", ["no_such", "own_package.no_such", "own_script.train", "json.decoder.no", "sys.path"])
def test_what_is_not_there_is_not_found(project: Path, name: str) -> None:
    assert modules.find(name) is None


def test_what_only_an_import_could_tell_counts_as_found(project: Path) -> None:
    assert modules.find("own_space.nested.deep") is not None
    assert modules.find("own_package.inner.deep") is not None


def test_a_package_that_moves_may_have_more(project: Path) -> None:
    (project / "own_package" / "__init__.py").write_text(
        "__path__ = __import__('pkgutil').extend_path(__path__, __name__)"
    )
    assert modules.find("own_package.elsewhere") is not None


def test_a_folder_hides_no_package(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "own_package").mkdir()
    assert modules.find("own_package.train", [str(other)]) is not None


def test_odd_paths_and_finders_are_borne(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object) -> None:
            """As the import system calls it."""

    monkeypatch.setattr(sys, "path", [*sys.path, project])
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert modules.find("own_script") is not None
    assert not modules.is_installed(str(project))
    assert project not in modules.search_path()


def test_folders_come_before_pythons_path(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "own_script.py").touch()
    found = modules.find("own_script", [str(other)])
    assert found is not None
    assert found.origin == str(other / "own_script.py")


def test_what_is_installed(project: Path) -> None:
    assert modules.is_installed(str(pytest.__file__))
    assert modules.is_installed(str(Path(types.__file__)))
    assert not modules.is_installed(str(project / "own_script.py"))


def test_own_modules(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = types.ModuleType("own_loaded")
    user.__file__ = str(project / "own_loaded.py")
    monkeypatch.setitem(sys.modules, "own_loaded", user)
    own = modules.own_modules()
    assert user in own
    assert sys.modules[__name__] in own
    for module in ("os", "json", "pytest", "cloudpickle", "distributor", "distributor.shipping.pickling", "__main__"):
        assert sys.modules.get(module) not in own
    made = types.ModuleType("torch.ops")  # as torch makes it
    made.__file__ = "_ops.py"
    monkeypatch.setitem(sys.modules, "torch.ops", made)
    assert made not in modules.own_modules()
    # Under a second name it is still the same module; cloudpickle looks for it under its first.
    monkeypatch.setitem(sys.modules, "own_alias", user)
    assert modules.own_modules().count(user) == 1


def test_the_main_module_is_left_to_cloudpickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert main not in modules.own_modules()


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as ``pip install --target`` leaves it, with a package, and a module of the user's beside it."""
    folder = tmp_path / "libs"
    (folder / "put_package" / "inner").mkdir(parents=True)
    (folder / "put_package-1.0.dist-info").mkdir()
    (folder / "put_package-1.0.dist-info" / "RECORD").write_text(
        "put_package/__init__.py,sha256=x,0\nput_package/inner/__init__.py,,\n../../bin/put,,\n"
        "put_package-1.0.dist-info/RECORD,,\n"
    )
    for name in ("put_package/__init__.py", "put_package/inner/__init__.py", "own_beside.py", "put_package/own.py"):
        (folder / name).touch()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_what_pip_put_into_a_folder_is_installed(target: Path) -> None:
    for name in ("put_package", "put_package/__init__.py", "put_package/inner/__init__.py"):
        assert modules.is_installed(str(target / name))
        assert modules.target_folder(str(target / name)) == str(target)
    for name in ("own_beside.py", "put_package/own.py", "absent.py"):
        assert not modules.is_installed(str(target / name))


def test_only_the_users_modules_beside_it_travel(target: Path) -> None:
    names = ("put_package.inner", "own_beside", "put_package.own")
    for name in names:
        importlib.import_module(name)
    try:
        own = {module.__name__ for module in modules.own_modules()}
    finally:
        for name in ("put_package", *names):
            del sys.modules[name]
    assert own & {"put_package", *names} == {"own_beside", "put_package.own"}


def test_a_package_that_is_put_there_later_counts(target: Path) -> None:
    assert not modules.is_installed(str(target / "later.py"))
    (target / "later.py").touch()
    (target / "later-2.0.dist-info").mkdir()
    (target / "later-2.0.dist-info" / "RECORD").write_text("later.py,,\n")
    os.utime(target, (1.0, 1.0))  # clocks of file systems are coarse
    assert modules.is_installed(str(target / "later.py"))
