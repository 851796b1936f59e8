"""The files of a folder at one moment."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest

from distributor.machine import folders
from distributor.shipping import project, tree


def test_files_are_found_by_relative_paths(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.txt", "b/__pycache__/d.pyc", ".git/e", "out/f", "g.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "inside").symlink_to("b/c.txt")
    (tmp_path / "folder").symlink_to("b")
    (tmp_path / "outside").symlink_to("/etc/passwd")
    (tmp_path / "broken").symlink_to("absent")
    os.mkfifo(tmp_path / "pipe")
    found = tree.stamps(str(tmp_path), [os.path.realpath(tmp_path / "out")])
    assert sorted(found) == ["a.txt", "b/c.txt", "inside"]
    assert found["a.txt"] == tree.stamp(str(tmp_path / "a.txt"))
    assert found["a.txt"].size == 5


@pytest.mark.parametrize("inside", ["", "tmp"])
def test_temporary_folders_of_runs_are_no_files_of_the_project(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    temporary = tmp_path / "link" / inside
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for name in ("distributor-data/a", "tmp/distributor-data/b", "tmp/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    run = Path(folders.make("3f2a"))
    with folders.claim(run):
        (run / "rank-0.stdout").touch()
        found = tree.stamps(str(tmp_path))
        with zipfile.ZipFile(io.BytesIO(project.pack_folder(tmp_path, 1 << 20))) as archive:
            shipped = archive.namelist()
    others = [] if inside else ["tmp/c", "tmp/distributor-data/b"]
    assert sorted(found) == sorted(shipped) == ["distributor-data/a", *others]


def test_a_change_shows(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = tree.stamps(str(tmp_path))
    (tmp_path / "b").write_text("2")
    os.replace(tmp_path / "b", tmp_path / "a")
    assert tree.stamps(str(tmp_path)) != before
    assert tree.stamps(str(tmp_path / "absent")) == {}


def test_an_entry_describes_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    (tmp_path / "a").chmod(0o604)
    entry = tree.describe(str(tmp_path), "a")
    assert (entry.path, entry.size, entry.mode) == ("a", 7, 0o604)
    assert entry.digest == hashlib.sha256(b"content").hexdigest()
    with pytest.raises(FileNotFoundError):
        tree.describe(str(tmp_path), "absent")
