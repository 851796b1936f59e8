"""Private folders: made, claimed, and removed when their owner is gone."""

import os
import stat

import pytest

from distributor.machine import folders
from distributor.values import layout


@pytest.fixture(autouse=True)
def own_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_folders_are_private_and_named_after_the_run(tmp_path):
    first, second = folders.make("run7"), folders.make("run7")
    assert first != second
    for folder in (first, second):
        assert os.path.dirname(folder) == str(tmp_path)
        assert os.path.basename(folder).startswith(f"{layout.PREFIX}run7-")
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_a_folder_goes_once_its_owner_has(tmp_path):
    claimed, unclaimed, stale = (folders.make(name) for name in ("claimed", "unclaimed", "stale"))
    folders.claim(stale).close()
    with folders.claim(claimed):
        folders.remove_stale()
        assert os.path.exists(claimed)
        assert os.path.exists(unclaimed)  # its owner is about to claim it
        assert not os.path.exists(stale)


@pytest.mark.parametrize("survivors", range(1, 5))
def test_a_removal_that_was_interrupted_is_ended_by_the_next(monkeypatch, survivors):
    folder = folders.make("stale")
    folders.claim(folder).close()
    for name in ("a", "owned", "z"):
        open(os.path.join(folder, name), "w").close()

    def interrupted(path, *arguments, **options):
        if len(os.listdir(folder)) == survivors:
            raise SystemExit
        unlink(path, *arguments, **options)

    unlink = os.unlink
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(os, "unlink", interrupted)
        folders.remove_stale()
    assert len(os.listdir(folder)) == survivors
    folders.remove_stale()
    assert not os.path.exists(folder)


def test_paths_noted_in_a_folder_are_removed_with_it(tmp_path):
    kept, one, two = (tmp_path / name for name in ("kept", "one", "two"))
    for path in (kept, one, two):
        path.touch()
    first, stale = folders.make("first"), folders.make("stale")
    folders.note_elsewhere(first, [str(one), str(tmp_path / "absent")])
    folders.remove(first)
    assert not os.path.exists(first) and not one.exists() and two.exists()
    folders.note_elsewhere(stale, [str(two)])
    folders.claim(stale).close()
    folders.remove_stale()
    assert not os.path.exists(stale) and not two.exists() and kept.exists()


def test_what_others_can_write_to_is_not_private(tmp_path):
    folder = folders.make("run7")
    assert folders.is_private(folder)
    os.chmod(folder, 0o770)
    assert not folders.is_private(folder)
    (tmp_path / "link").symlink_to(folder)
    assert not folders.is_private(tmp_path / "link")


def test_what_stays_to_the_end_outlives_an_attempt_and_goes_with_the_folder(tmp_path):
    folder, once, kept = tmp_path / "folder", tmp_path / "once", tmp_path / "kept"
    for path in (folder, once, kept):
        path.mkdir()
    folders.note_elsewhere(folder, [str(once)])
    folders.note_elsewhere(folder, [str(kept)], to_the_end=True)
    folders.remove_elsewhere(folder)
    assert (once.exists(), kept.exists()) == (False, True)
    folders.remove(folder)
    assert not kept.exists()
