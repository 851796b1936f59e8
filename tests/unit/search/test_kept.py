"""Where a study is kept, and what a driver that was killed has left there."""

import json
import time

import pytest

optuna = pytest.importorskip("optuna")

from jobs import make_job  # noqa: E402

from distributor.errors import StartError  # noqa: E402
from distributor.search.kept import Kept  # noqa: E402

METRIC = ("loss", "min")


def test_a_study_has_the_same_folder_whatever_the_current_one_is(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTRIBUTOR_RUNS", "runs")
    monkeypatch.chdir(tmp_path)
    assert Kept.of(None, "digits").folder == f"{tmp_path}/runs/digits"


def test_what_a_killed_driver_has_left_in_the_journal_holds_up_nobody(tmp_path):
    kept = Kept("digits", str(tmp_path))
    with kept.held(make_job("a0", 1), METRIC):
        kept.study(METRIC).set_user_attr("seen", 1)
    journal = tmp_path / "study.journal"
    (tmp_path / "study.journal.lock").symlink_to(journal)  # killed between the lock and the end of its line
    with journal.open("a") as file:
        file.write(json.dumps({"op_code": 2})[:-3])
    begun = time.monotonic()
    with kept.held(make_job("b1", 1), METRIC):
        study = kept.study(METRIC)
        study.set_user_attr("again", 2)
        assert {"seen": 1, "again": 2}.items() <= study.user_attrs.items()
    assert time.monotonic() - begun < 20  # Optuna waits 30 s for such a lock


def test_two_drivers_that_begin_at_once_do_not_both_have_a_study(tmp_path):
    """Each writes its record beside the other's."""
    kept = Kept("digits", str(tmp_path))
    with kept.held(make_job("a0", 1), METRIC), pytest.raises(StartError, match="is held by run a0"):
        with kept.held(make_job("b1", 1), METRIC):
            pass
