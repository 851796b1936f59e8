"""Project folders as zips, with the modes and links of their files."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from distributor.errors import PayloadError
from distributor.shipping import project

NO_LIMIT = 1 << 40


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shipped(folder, target, limit=NO_LIMIT):
    project.unpack_folder(project.pack_folder(folder, limit), target)
    return read(target)


FILES = {
    "train.py": b"print()",
    "empty": b"",
    "pkg/__init__.py": b"",
    "pkg/data/table.bin": bytes(range(256)) * 50,
    "a name with ä.txt": "ä".encode(),
    ".hidden": b"1",
    "venv.py": b"not a folder",
    "build/out.txt": b"2",
}
LEFT = {
    ".git/config": b"",
    "__pycache__/train.cpython-311.pyc": b"",
    "pkg/__pycache__/x.txt": b"",
    "venv/bin/python": b"",
    ".venv/x": b"",
    ".venvs/main/x": b"",
    "pkg/.mypy_cache/x": b"",
    "old.pyc": b"",
    "old.pyo": b"",
}


def test_round_trip(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, FILES | LEFT)
    assert shipped(source, target) == FILES


names = st.text("ab.ä ", min_size=1, max_size=4).map(lambda text: f"f{text}x")


@given(st.dictionaries(st.tuples(names, names).map("/".join), st.binary(max_size=50), max_size=6))
def test_any_files_survive(files):
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        source.mkdir()
        write(source, files)
        assert shipped(source, target) == files


@pytest.mark.parametrize("mode", [0o755, 0o644, 0o700, 0o600, 0o444])
def test_modes_survive(tmp_path, mode):
    write(tmp_path / "source", {"run.sh": b"#!/bin/sh\n"})
    (tmp_path / "source" / "run.sh").chmod(mode)
    shipped(tmp_path / "source", tmp_path / "target")
    assert stat.S_IMODE((tmp_path / "target" / "run.sh").stat().st_mode) == mode


def test_links_to_files_are_followed_and_dangling_ones_left_out(tmp_path):
    source = tmp_path / "source"
    write(tmp_path, {"shared.py": b"shared", "source/own.py": b"own"})
    (source / "link.py").symlink_to(tmp_path / "shared.py")
    (source / "dangling").symlink_to(tmp_path / "absent")
    (source / "loop").symlink_to(source)
    assert shipped(source, tmp_path / "target") == {"own.py": b"own", "link.py": b"shared"}


@pytest.mark.parametrize("link", ["a-link", "z-link"])
def test_links_to_folders_of_the_project_stay_links(tmp_path, link):
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, {"runs/one/config": b"one"})
    (source / link).symlink_to(source / "runs" / "one")
    (source / "runs" / "latest").symlink_to("one")
    shipped(source, target)
    assert (target / "runs/one/config").read_bytes() == b"one"
    for found in (target / link, target / "runs" / "latest"):
        assert found.is_symlink()
        assert found.resolve() == (target / "runs/one").resolve()


def test_links_to_folders_elsewhere_are_followed_each(tmp_path):
    source = tmp_path / "source"
    write(tmp_path, {"data/part": b"1", "source/own.py": b"own", "source/.venv/lib/module.py": b"m"})
    (tmp_path / "data" / "back").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "own").symlink_to(source)
    for name, leads in (("train", tmp_path / "data"), ("valid", tmp_path / "data"), ("lib", source / ".venv" / "lib")):
        (source / name).symlink_to(leads)
    assert shipped(source, tmp_path / "target") == {
        "own.py": b"own",
        "train/part": b"1",
        "valid/part": b"1",
        "lib/module.py": b"m",
    }


def test_what_is_no_file_is_left_out(tmp_path):
    write(tmp_path / "source", {"own.py": b"own"})
    os.mkfifo(tmp_path / "source" / "fifo")
    assert shipped(tmp_path / "source", tmp_path / "target") == {"own.py": b"own"}


def test_files_from_before_1980_are_shipped(tmp_path):
    write(tmp_path / "source", {"old.py": b"old"})
    os.utime(tmp_path / "source" / "old.py", (0, 0))  # zip knows no such year
    assert shipped(tmp_path / "source", tmp_path / "target") == {"old.py": b"old"}


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):  # zip holds names in UTF-8
    (tmp_path / "source").mkdir()
    with open(os.fsencode(tmp_path / "source") + b"/\xff.txt", "wb"):
        pass
    with pytest.raises(PayloadError) as caught:
        project.pack_folder(tmp_path / "source", NO_LIMIT)
    for word in [repr(str(tmp_path / "source")), "not UTF-8", repr(os.fsdecode(b"\xff.txt")), "rename it"]:
        assert word in str(caught.value)
    str(caught.value).encode()  # can be printed


SIZES = {"small.bin": bytes(1 << 19), "data/large.bin": bytes(3 << 19), ".git/pack": bytes(4 << 20)}


def test_the_limit_is_for_all_files_that_are_shipped(tmp_path):
    write(tmp_path / "source", SIZES)
    assert len(shipped(tmp_path / "source", tmp_path / "target", limit=2 << 20)) == 2


def test_more_than_the_limit_is_refused(tmp_path):
    source = tmp_path / "source"
    write(source, SIZES)
    with pytest.raises(PayloadError) as caught:
        project.pack_folder(source, limit=(2 << 20) - 1)
    for word in [repr(str(source)), "holds 2.0 MiB", "working_dir_limit", "'data/large.bin' (1.5 MiB)"]:
        assert word in str(caught.value)


def test_an_empty_folder_can_be_shipped(tmp_path):
    (tmp_path / "source").mkdir()
    assert shipped(tmp_path / "source", tmp_path / "target", limit=0) == {}


def test_empty_folders_of_the_project_are_shipped(tmp_path):
    """Into which training may write."""
    (tmp_path / "source/runs/new").mkdir(parents=True)
    (tmp_path / "source/.git").mkdir()
    (tmp_path / "source/latest").symlink_to("runs/new")
    assert shipped(tmp_path / "source", tmp_path / "target") == {}
    assert sorted(path.name for path in (tmp_path / "target").rglob("*")) == ["latest", "new", "runs"]
    assert (tmp_path / "target/latest").resolve() == tmp_path / "target/runs/new"


@pytest.mark.parametrize("moment", ["listed", "measured"])
def test_a_file_that_vanishes_meanwhile_is_left_out(tmp_path, monkeypatch, moment):
    """Such as one that another process writes under a temporary name, and renames."""
    source = tmp_path / "source"
    write(source, {"kept.py": b"1", "vanishing.part": b"22", "last.py": b"3"})
    listed, packed = project._files_below, []

    def list_and_remove(*args):
        yield from list(listed(*args))
        if moment == "listed":
            (source / "vanishing.part").unlink()

    def remove(done, total):
        packed.append((done, total))
        (source / "vanishing.part").unlink(missing_ok=True)

    monkeypatch.setattr(project, "_files_below", list_and_remove)
    project.unpack_folder(project.pack_folder(source, NO_LIMIT, remove), tmp_path / "target")
    assert read(tmp_path / "target") == {"kept.py": b"1", "last.py": b"3"}
    assert packed[0] == (0, 2 if moment == "listed" else 4)


def test_a_listed_file_that_has_vanished_is_left_out(tmp_path):
    write(tmp_path, {"kept.py": b"1"})
    archive = project.pack_files(tmp_path, [tmp_path / "vanished", tmp_path / "kept.py"])
    project.unpack_folder(archive, tmp_path / "target")
    assert read(tmp_path / "target") == {"kept.py": b"1"}
