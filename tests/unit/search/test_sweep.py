"""What Optuna is told of a trial's reports, and how a study that is kept goes on; runs are stood in for."""

import math
import os
import secrets
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from distributor import ConfigurationError, Distributor, StartError, sweep, uniform
from distributor.metrics.table import Metrics, Row
from distributor.search.sweep import _Search

numpy = pytest.importorskip("numpy")
optuna = pytest.importorskip("optuna")

GOAL = ("loss", "min")


class Ended:
    """A run that has ended; it has reported once in each attempt."""

    _reports_live = True
    progress = error = None

    def __init__(self, *reports):
        self.id = secrets.token_hex(6)
        self.metrics = Metrics(tuple(Row(number, 1, 0.0, 0, values) for number, values in enumerate(reports)))
        self.latest_metrics = reports[-1]

    def result(self):
        return None

    def wait(self, timeout=None):
        return True

    def cancel(self, why):
        pass

    def snapshot(self):
        return SimpleNamespace(seconds=1.0)


def train(x, y=0):
    return x + y


@pytest.fixture
def submitted(monkeypatch):
    """Runs of trials end at once, unless their calls are refused. Returns their places of checkpoints and arguments."""
    calls = []

    def submit(self, function, *args, **kwargs):
        self.plan(function, *args, **kwargs)
        calls.append((self._options.project.checkpoints.dir, kwargs))
        return Ended({"loss": float(function(*args, **kwargs))})

    monkeypatch.setattr(Distributor, "submit", submit)
    return calls


@pytest.fixture
def search(submitted, tmp_path):
    """Goes on with a study in a storage."""
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
    storage = optuna.storages.JournalStorage(backend)

    def go_on(space, function=train, trials=2, sampler=None, **options):
        distributor = Distributor(
            1, local_mode=True, use_gpu=False, progress=False, checkpoints=str(tmp_path), **options
        )
        given = {"metric": GOAL, "trials": trials, "at_once": 1, "sampler": sampler}
        return sweep(distributor, function, space, name="kept", storage=storage, **given)

    go_on.storage = storage
    return go_on


def states(search):
    study = optuna.load_study(study_name="kept", storage=search.storage)
    return [trial.state.name for trial in study.get_trials()]


def test_without_a_pruner_the_last_report_of_the_lowest_rank_is_noted():
    noted = []
    active = SimpleNamespace(
        pruned=False,
        rank=math.inf,
        known={},
        trial=SimpleNamespace(report=lambda value, step: noted.append((step, value))),
    )
    search = SimpleNamespace(_metric=("loss", "min"), _prunes=False, _kept=SimpleNamespace(resumes=True))
    rows = [Row(0, step, 0.0, rank, {"loss": step + rank / 10}) for step in (1, 2) for rank in (0, 1)]
    _Search._report(search, active, (Row(0, -1, 0.0, 0, {"loss": 9.0}), *rows, Row(0, None, 0.0, 0, {"loss": 9.0})))
    assert noted == [(2, 2.0)]
    search._kept.resumes = False
    _Search._report(search, active, (Row(0, 3, 0.0, 0, {"loss": 3.0}),))
    assert noted == [(2, 2.0)]


def test_other_choices_are_refused_and_the_study_goes_on_with_those_it_had(search):
    search({"x": [1, 2]}, trials=1)
    for space in ({"x": [1, 2, 3]}, {"x": uniform(0, 1)}):
        with pytest.raises(ConfigurationError, match=r"begun with x from Cat.*1, 2.*: pass that, or another name"):
            search(space)
    study = search({"x": [1, 2]})
    assert [trial.outcome for trial in study.table] == ["complete"] * 2


def test_a_script_from_a_pipe_is_refused(search, tmp_path):
    os.mkfifo(tmp_path / "train.py")
    with pytest.raises(ConfigurationError, match=r"train.py' is a pipe, which only the first trial could read"):
        search({"x": [1, 2]}, tmp_path / "train.py")


def test_a_call_that_is_refused_leaves_no_trial_to_the_next(search):
    with pytest.raises(ConfigurationError, match="cannot be called with these arguments"):
        search({"z": [1]}, trials=1)
    assert states(search) == ["FAIL"]
    study = search({"x": [1]}, trials=1)
    assert [(trial.number, trial.params) for trial in study.table] == [(1, {"x": 1})]
    assert [trial.number for trial in search({"x": [1]}, trials=1).table] == [1]


def test_what_a_user_has_queued_is_tried_first_and_counts_once_it_begins(search, submitted):
    study = optuna.create_study(study_name="kept", storage=search.storage)
    study.enqueue_trial({"x": 2})
    study.enqueue_trial({"y": 7})
    sampler = optuna.samplers.RandomSampler()
    found = search({"x": [1, 2], "y": [5, 7]}, trials=3, sampler=sampler)
    assert [trial.number for trial in found.table] == [0, 1, 2]
    assert submitted[0][1]["x"] == 2
    assert submitted[1][1]["y"] == 7


def test_what_is_queued_but_not_in_the_space_fails_alone(search):
    study = optuna.create_study(study_name="kept", storage=search.storage)
    study.enqueue_trial({"x": 3})
    with pytest.raises(ConfigurationError, match=r"trial 0 of the study 'kept' cannot choose.*'3' not in \(1, 2\)"):
        search({"x": [1, 2]}, trials=1)
    assert [trial.outcome for trial in search({"x": [1, 2]}, trials=1).table] == ["complete"]


def test_a_trial_whose_driver_was_killed_while_it_chose_gets_the_rest(search, submitted):
    study = optuna.create_study(study_name="kept", storage=search.storage)
    study.ask().suggest_categorical("x", [1, 2])
    found = search({"x": [1, 2], "y": [5]}, trials=1)
    assert [trial.number for trial in found.table] == [0]
    assert submitted[0][1].keys() == {"x", "y"}


def begin_alone(search, space, monkeypatch):
    """Begin a trial, whose driver is killed."""

    def killed(self, trial):
        raise StartError("killed")

    with monkeypatch.context() as patch, pytest.raises(StartError):
        patch.setattr(_Search, "_tell", killed)
        search(space, trials=1)


@pytest.mark.parametrize(
    ("space", "queued"),
    [
        ({"x": [numpy.float64(0.001)]}, {}),
        ({"x": [numpy.int64(1)]}, {}),
        ({"x": uniform(0, 1)}, {"x": numpy.float64(0.5)}),
        ({"x": uniform(0, 10)}, {"x": 5}),
        ({"x": uniform(1, 1)}, {}),
    ],
)
def test_a_trial_that_begins_again_has_the_folder_that_it_had(search, submitted, monkeypatch, space, queued):
    optuna.create_study(study_name="kept", storage=search.storage).enqueue_trial(queued)
    begin_alone(search, space, monkeypatch)
    search(space, trials=1)
    assert len(submitted) == 2
    assert submitted[0] == submitted[1]
    assert {type(params["x"]) for _, params in submitted} <= {int, float}


def test_a_trial_that_had_begun_stays_for_a_later_call_if_this_one_is_refused(search, monkeypatch):
    begin_alone(search, {"x": [1]}, monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(ConfigurationError, match="too few slots"):
        patch.setattr(Distributor, "submit", Mock(side_effect=ConfigurationError("too few slots")))
        search({"x": [1]}, trials=1)
    assert states(search) == ["RUNNING"]
    assert [(trial.number, trial.outcome) for trial in search({"x": [1]}, trials=1).table] == [(0, "complete")]


def test_a_value_counts_although_the_last_attempt_reports_only_others(search, monkeypatch):
    """It went on from a checkpoint after the last evaluation."""
    run = Ended({"loss": 3.0}, {"loss": 2.0, "lr": 1.0}, {"lr": 0.5})
    monkeypatch.setattr(Distributor, "submit", lambda *_, **__: run)
    assert [(trial.outcome, trial.value) for trial in search({"x": [1]}, trials=1).table] == [("complete", 2.0)]


def other(x, y=0):
    return -x


def test_a_study_is_of_one_function_and_its_parameters(search, tmp_path):
    search({"x": [1, 2]})
    with pytest.raises(ConfigurationError, match="the function or script 'train', and cannot go on with 'other': pass"):
        search({"x": [1, 2]}, function=other)
    with pytest.raises(ConfigurationError, match=r"script 'train', .* with 'train\.py': pass that, or another name="):
        search({"x": [1, 2]}, function=tmp_path / "train.py")
    with pytest.raises(ConfigurationError, match="the parameters 'x', and cannot go on with 'x, y': pass that, or"):
        search({"x": [1, 2], "y": [1]})
    changed = {}
    exec("def train(x): return 10 * x", changed)
    assert len(search({"x": [1, 2]}, function=changed["train"], trials=3).table) == 3


def test_a_study_of_another_kind_is_refused_before_a_trial_begins(search, submitted):
    optuna.create_study(study_name="kept", storage=search.storage, direction="maximize")
    with pytest.raises(ConfigurationError, match=r"metric=\('loss', 'max'\), and cannot go on with \('loss', 'min'\)"):
        search({"x": [1]})
    assert submitted == []
