"""Folders and URLs as storage."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import stores

from distributor.machine.storage import Folder, Storage, Url
from distributor.shipping import tree


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_storage_keeps_files(tmp_path: Path, kind: str) -> None:
    storage: Storage = Folder(tmp_path / "run") if kind == "folder" else Url(f"file://{tmp_path}/run/")

    def sizes() -> dict[str, int]:
        return storage.sizes() if isinstance(storage, Url) else tree.sizes(str(storage.root))

    assert (sizes(), storage.folders(), storage.read("b/c.txt")) == ({}, [], None)
    (tmp_path / "a").write_text("content")
    storage.put(str(tmp_path / "a"), "b/c.txt")
    storage.put(str(tmp_path / "a"), "put")
    storage.move("put", "d/moved")
    storage.upload(str(tmp_path / "a"), "e")
    storage.write("e", b"new")
    storage.sync("b")
    assert sizes() == {"b/c.txt": 7, "d/moved": 7, "e": 3}
    assert sorted(storage.folders()) == ["b", "d"]
    os.utime(tmp_path / "run/b/c.txt", (2e9, 2e9))
    assert storage.changed("b") == 2e9
    assert (storage.changed("d") or 2e9) < 2e9
    storage.get("d/moved", str(tmp_path / "back/a"))
    assert (tmp_path / "back/a").read_text() == "content"
    for _ in range(2):
        storage.remove("d/moved")
        storage.remove_folder("b")
    if isinstance(storage, Url):
        storage.check("probe")
    assert sizes() == {"e": 3}
    assert (storage.size("d/moved"), storage.size("e"), storage.read("e")) == (None, 3, b"new")
    storage.write("f/g", b"")
    with pytest.raises(IsADirectoryError):
        storage.size("f")


@pytest.mark.parametrize("root", ["memory://runs", "file://{}"])
@pytest.mark.parametrize("name", ["exp[1]", "exp*", "exp?"])
def test_a_urls_folder_with_signs_of_patterns_is_removed_and_no_other(tmp_path: Path, root: str, name: str) -> None:
    both = [Url(f"{root.format(tmp_path)}/{folder}") for folder in (name, "exp1")]
    for each in both:
        each.write("step-1/model.pt", b"weights")
        each.write("step-1/below/a[b]", b"")
        each.write("step-2", b"")
    both[0].remove_folder("step-1")
    assert [sorted(each.sizes()) for each in both] == [["step-2"], ["step-1/below/a[b]", "step-1/model.pt", "step-2"]]
    assert not (tmp_path / name / "step-1").exists()
    both[1].remove_folder("step-1")
    assert sorted(both[1].sizes()) == ["step-2"]


def test_no_bucket_is_made_whose_name_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As s3fs does in makedirs."""
    makedirs = Mock()
    monkeypatch.setattr(stores, "FILES", {})
    monkeypatch.setattr(stores.Forgetful, "makedirs", makedirs)
    Url("forgetful://bucket/run").write("a/b", b"")
    assert not makedirs.called


def test_all_errors_of_a_storage_are_oserrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Url(f"file://{tmp_path}")
    with pytest.raises(OSError):
        remote.get("absent", str(tmp_path / "target"))

    def refuse(*_: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(remote._fs, "rm_file", refuse)
    remote.remove("a")  # there is none
    (tmp_path / "a").touch()
    with pytest.raises(OSError, match="RuntimeError: no credentials"):
        remote.remove("a")


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(OSError, match="fsspec is not installed"):
        Url("file:///tmp")


def test_a_long_name_is_written(tmp_path: Path) -> None:
    storage, name = Folder(tmp_path, "node-0"), "x" * 250
    storage.write(name, b"content")
    assert storage.read(name) == b"content"


def test_what_is_below_a_file_is_not_there_to_remove(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    Folder(tmp_path).remove("a/b")
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize("below", ["", "below/deeper"])
@pytest.mark.parametrize("kind", ["a file", "a link that leads to no folder"])
def test_an_error_says_what_stands_where_the_folder_should_be(tmp_path: Path, kind: str, below: str) -> None:
    there = tmp_path / "there"
    there.write_text("") if kind == "a file" else there.symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match=f"there is {kind}"):
        Folder(there / below).write("a", b"")


def test_a_folder_that_cannot_be_made_keeps_the_systems_words() -> None:
    with pytest.raises(OSError, match="/proc/nothing"):
        Folder(Path("/proc/nothing/below")).write("a", b"")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    storage = Folder(tmp_path)
    storage.write("kept", b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.write("kept", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert storage.read("kept") == b"old"
