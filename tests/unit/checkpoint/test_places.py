"""Where ``load_checkpoint`` looks: this run's place, or the folder, URL or run that ``folder=`` names."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import stores
import torch

from distributor import ConfigurationError, runtime
from distributor.checkpoint import context, training_state
from distributor.checkpoint.catalog import Catalog, Draft
from distributor.checkpoint.places import CheckpointPlace, find
from distributor.checkpoint.records import MANIFEST, Shard, folder_name
from distributor.machine.storage import open_storage
from distributor.metrics import rank as reports
from distributor.values import lease_record
from distributor.values.checkpoints import PLACE, Checkpoints, Settings
from distributor.values.environment import NODE_ID
from distributor.values.lease_record import FencingToken, Holder, Identity
from distributor.values.sealed import seal


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(context, "_session", None)
    monkeypatch.setattr(context, "_told", None)
    monkeypatch.setattr(stores, "FILES", {})
    monkeypatch.delenv(PLACE, raising=False)
    monkeypatch.chdir(tmp_path)
    yield


def commit(place: str, step: int = 1) -> None:
    storage, name = open_storage(place), folder_name(step, "3f-0", step)
    storage.write(f"{name}/model.pt", b"x")
    shard = Shard("model.pt", 1, zlib.crc32(b"x"))
    Catalog(storage, Checkpoints(place)).commit(Draft(name, step, 1, "3f-0", (shard,), {}))


def named_run(root: str, name: str, trainings: int = 1, *, saved: bool = True) -> str:
    """Make the record and the checkpoints of a named run; return the folder of its newest training."""
    place, record = lease_record.folder_of(root, name), None
    for training in range(1, trainings + 1):
        record = lease_record.following(record, Identity(name, "never", "train"), Holder("3f", "h", "", 1, ""))
        if saved:
            commit(lease_record.training_folder(place, training))
    assert record is not None
    open_storage(place).write(lease_record.FILES[0], seal(record))
    return lease_record.training_folder(place, trainings)


def settings(place: str | Path, fence: str | None = None) -> Settings:
    token = None if fence is None else FencingToken(fence, "3f")
    return Settings(Checkpoints(str(place)), None, {}, True, fence=token)


@pytest.mark.parametrize("root", ["runs", "forgetful://bucket/runs"])
def test_a_place_is_a_folder_a_url_or_a_run_of_the_same_place(root: str, tmp_path: Path) -> None:
    where = root if "://" in root else str(tmp_path / root)
    commit(f"{root}/plain")
    record = lease_record.taken(None, Holder("3f", "h", "", 1, ""))
    open_storage(f"{root}/plain").write(lease_record.FILES[0], seal(record))
    newest = named_run(where, "gpt 2", trainings=2)
    other = named_run(where, "team/gpt")
    assert find("team/gpt", settings(root)) == CheckpointPlace(other)
    assert find(f"{root}/plain", settings("other")) == CheckpointPlace(f"{where}/plain")
    assert find(f"{root}/gpt%202", settings("other")) == CheckpointPlace(newest)
    assert find("gpt 2", settings(root)) == CheckpointPlace(newest)
    assert find("gpt 2", settings(f"{where}/mine/1", fence=f"{where}/mine")) == CheckpointPlace(
        newest
    )  # a named run has that place
    unnamed = FencingToken(where, "3f", is_named=False)
    assert find("gpt 2", replace(settings(where), fence=unnamed)) == CheckpointPlace(newest)
    assert newest.endswith("/2")
    one = folder_name(1, "3f-0", 1)
    assert find(f"{root}/plain/{one}/", settings("other")) == CheckpointPlace(f"{where}/plain", one)


def test_where_nothing_is_found_the_error_says_where_it_looked(tmp_path: Path) -> None:
    named_run(str(tmp_path / "runs"), "empty", saved=False)
    for folder, looked in {
        "gone": (f"{tmp_path}/gone", f"{tmp_path}/runs/gone"),
        "empty": (f"{tmp_path}/empty", f"{tmp_path}/runs/empty/1"),
        "a/b": (f"{tmp_path}/a/b", f"{tmp_path}/runs/a%2Fb"),
        "runs/empty/1/step-1-3f-0-1": (f"{tmp_path}/runs/empty/1/step-1-3f-0-1",),
    }.items():
        with pytest.raises(ConfigurationError) as caught:
            find(folder, settings("runs"))
        assert all(repr(place) in str(caught.value) for place in looked), folder


def test_the_folder_above_named_runs_is_no_place_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "second"):
        named_run(str(tmp_path), name)
    with pytest.raises(ConfigurationError, match="named runs: pass folder='.*/first', '.*/second'$"):
        find(str(tmp_path), settings("other"))
    monkeypatch.setenv(PLACE, str(tmp_path))
    assert runtime.load_checkpoint({"step": 0}) is None  # without folder=, it is no error
    assert "which has the folders of named runs: pass folder=" in caplog.text


def test_the_last_or_the_best_is_loaded_from_another_folder_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "mine"))
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
        monkeypatch.setattr(reports, "latest", lambda loss=loss: {"loss": loss})
        runtime.save_checkpoint({"step": step}, step=step, wait=True)
    monkeypatch.setenv(PLACE, str(tmp_path / "others"))  # has an effect after the first call, too
    assert runtime.load_checkpoint({"step": 0}) is None
    state = {"step": 0}
    assert runtime.load_checkpoint(state, folder=tmp_path / "mine") == state["step"] == 3
    assert runtime.load_checkpoint(state, folder=tmp_path / "mine", best=("loss", "min")) == state["step"] == 2
    first = next((tmp_path / "mine").glob("step-1-*"))
    assert runtime.load_checkpoint(state, folder=first) == state["step"] == 1
    with pytest.raises(ConfigurationError, match="no checkpoint with the metric 'accuracy' in '.*mine'"):
        runtime.load_checkpoint(state, folder=tmp_path / "mine", best=("accuracy", "max"))
    monkeypatch.setenv(PLACE, str(tmp_path / "mine"))
    assert runtime.load_checkpoint({"step": 0}) == 3
    assert runtime.load_checkpoint({"step": 0}, best=("loss", "min")) == 2


@pytest.mark.parametrize("is_one", [False, True])
@pytest.mark.parametrize("damage", ["unreadable", "torn"])
def test_why_another_folders_checkpoint_is_not_loaded(
    is_one: bool, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "mine"))
    saved = runtime.save_checkpoint({"step": 1}, step=1, wait=True)
    manifest = saved.path / MANIFEST
    if damage == "unreadable":
        stores.unreadable(manifest)
        told: Any = pytest.raises(OSError, match="no checkpoint in '.*mine' can be loaded: step-1-.*cannot be read")
    else:
        manifest.write_bytes(manifest.read_bytes()[:-9])
        told = pytest.raises(ConfigurationError, match="no checkpoint in '.*mine' that can be loaded")
    with told:
        runtime.load_checkpoint({"step": 0}, folder=saved if is_one else saved.path.parent)
    assert (f"passes over {saved.path.name} ({MANIFEST} is incomplete" in caplog.text) == (damage == "torn")


def test_a_checkpoint_that_was_downloaded_may_be_passed_as_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, "forgetful://bucket/mine")
    for step in (1, 2):
        runtime.save_checkpoint({"step": step}, step=step, wait=True)
        if step == 1:
            first = runtime.latest_checkpoint()
    state = {"step": 0}
    assert first is not None
    assert runtime.load_checkpoint(state, folder=first) == state["step"] == 1


def test_what_was_downloaded_from_another_place_is_removed_after_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(PLACE, "forgetful://bucket/others")
    runtime.save_checkpoint({"step": 1}, step=1, wait=True)
    monkeypatch.setenv(PLACE, str(tmp_path / "mine"))
    before = set(tmp_path.glob("checkpoints-*"))
    assert runtime.load_checkpoint({"step": 0}, folder="forgetful://bucket/others") == 1
    with pytest.raises(ConfigurationError, match="it was saved from another model"):
        runtime.load_checkpoint({"other": torch.nn.Linear(1, 1)}, folder="forgetful://bucket/others")
    assert set(tmp_path.glob("checkpoints-*")) == before


def test_no_training_begins_anew_beside_checkpoints_without_the_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "mine"))
    assert runtime.load_checkpoint({"step": 0}, best=("loss", "min")) is None
    runtime.save_checkpoint({"step": 1}, step=1, wait=True)
    with pytest.raises(
        ConfigurationError, match=r"no checkpoint with the metric 'loss' in '.*mine' that.*leave best= out"
    ):
        runtime.load_checkpoint({"step": 0}, best=("loss", "min"))
    assert runtime.load_checkpoint({"step": 0}) == 1


def test_files_of_checkpoint_folder_are_passed_over_by_loads_of_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "mine"))
    monkeypatch.setattr(reports, "latest", lambda: {"loss": 0.5})
    runtime.save_checkpoint({"step": 1}, step=1, wait=True)
    monkeypatch.setattr(reports, "latest", lambda: {"loss": 0.1})
    for step in range(2, 7):  # more than are kept
        with runtime.checkpoint_folder(step) as folder:
            (folder / "exported.txt").write_text("weights")
    assert runtime.load_checkpoint({"step": 0}) == 1
    assert runtime.load_checkpoint({"step": 0}, folder=tmp_path / "mine", best=("loss", "min")) == 1
    last = runtime.latest_checkpoint()
    assert last is not None and last.step == 6
    with pytest.raises(ConfigurationError, match="of step 6 was written by checkpoint_folder"):
        runtime.load_checkpoint({"step": 0}, folder=last.path)
    assert sorted(path.name.split("-")[1] for path in (tmp_path / "mine").glob("step-*")) == ["1", "4", "5", "6"]


@pytest.mark.parametrize("value", [[Path("a")], frozenset({1}), np.ones(2)])
def test_later_saves_refuse_what_cannot_be_loaded_either(value: object) -> None:
    runtime.save_checkpoint({"value": [1]}, step=1, wait=True)
    for step in (2, 3):
        with pytest.raises(ConfigurationError, match="load_checkpoint would refuse this state"):
            runtime.save_checkpoint({"value": value}, step=step, wait=True)
    runtime.save_checkpoint({"value": value}, step=4, wait=True, weights_only=False)
    state: dict[str, object] = {"value": 0}
    assert runtime.load_checkpoint(state, weights_only=False) == 4
    assert str(state["value"]) == str(value)


def test_objects_are_checked_again_only_if_they_name_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Mock(wraps=training_state.check_weights_only)
    monkeypatch.setattr(training_state, "check_weights_only", check)
    for step, value in enumerate(([1], {"a": 2.5}, torch.ones(2), [torch.zeros(3)])):  # the third names FloatStorage
        runtime.save_checkpoint({"value": value}, step=step, wait=True)
    assert check.call_count == 2


def test_without_checksums_in_files_each_save_is_checked() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        for step in (1, 2):
            runtime.save_checkpoint({"value": [step]}, step=step, wait=True)
        with pytest.raises(ConfigurationError, match="load_checkpoint would refuse this state"):
            runtime.save_checkpoint({"value": frozenset({1})}, step=3, wait=True)
        assert runtime.load_checkpoint({"value": 0}) == 2
    finally:
        torch.serialization.set_crc32_options(True)


def test_the_default_folder_is_named_once_without_a_run(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert runtime.load_checkpoint({"model": torch.nn.Linear(1, 1)}) is None
    assert runtime.load_checkpoint({"model": torch.nn.Linear(1, 1)}) is None
    assert [str(tmp_path / "checkpoints") in record.getMessage() for record in caplog.records] == [True]


def test_a_run_without_a_place_has_no_checkpoint_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(NODE_ID, "3f-0")
    assert runtime.load_checkpoint({"step": 0}) is None
    assert runtime.load_checkpoint({"step": 0}) is None
    assert ["pass Distributor(checkpoints=...)" in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(ConfigurationError, match="this run has no place for checkpoints"):
        runtime.save_checkpoint({"step": 0}, step=1)
    commit(str(tmp_path / "other"))
    with pytest.raises(ConfigurationError, match="was written by checkpoint_folder"):  # it was found
        runtime.load_checkpoint({"step": 0}, folder="other")
