"""What Optuna is told of a trial's reports, and how a study that is kept goes on; runs are stood in for."""

import gc
import math
import os
import queue
import secrets
import signal
import threading
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import watch

from distributor import ConfigurationError, Distributor, StartError, TrainingError, sweep, uniform
from distributor.metrics.table import Metrics, Row
from distributor.outcomes.driver_failures import context_stopped, jvm_ended
from distributor.search.sweep import _Search, _Slots

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


def test_trials_that_have_their_slots_leave_the_free_ones_to_others():
    """Also if their nodes cannot tell the driver that they run: what Spark counts as free is beside theirs."""

    def trial(holds):
        return SimpleNamespace(num_processes=1, _holds_slots=holds)

    scheduler = SimpleNamespace(on_driver=False, room=lambda job: 2)
    slots = SimpleNamespace(_at_once=None, _contends=True, _counts=True, _width=1, _job=None, _scheduler=scheduler)
    assert _Slots.free(slots, [trial(True), trial(True)])
    assert _Slots.free(slots, [trial(True), trial(False)])
    assert not _Slots.free(slots, [trial(False), trial(False)])


def test_all_news_are_taken_before_the_next_look_at_free_slots():
    """A look takes many calls to Spark, and each running trial has news twice a second."""
    taken = []
    search = SimpleNamespace(_lost=[], _events=queue.SimpleQueue(), _take=lambda *news: taken.append(news))
    for number in range(100):
        search._events.put((number, ()))
    _Search._handle(search, 0.0)
    assert taken == [(number, ()) for number in range(100)]


def test_trials_that_have_ended_are_known_before_another_begins(search, submitted, monkeypatch):
    """On a large cluster, slots may be free for as long as the search goes on."""

    class AtOnce:
        def __init__(self, target, args, **_):
            self.start = lambda: target(*args)

    known = []

    class Sampler(optuna.samplers.RandomSampler):
        def before_trial(self, study, trial):
            known.append(len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE])))

    monkeypatch.setattr(_Slots, "free", lambda slots, active: True)
    threads = SimpleNamespace(Thread=AtOnce, Event=threading.Event, Lock=threading.Lock)
    monkeypatch.setattr("distributor.search.sweep.threading", threads)
    search({"x": [1]}, trials=3, sampler=Sampler())
    assert known == [0, 1, 2]


@pytest.mark.parametrize("outcome", ["complete", "failed"])
def test_ctrl_c_just_after_optuna_was_told_ends_as_any_other(search, monkeypatch, outcome):
    run = Ended({"loss": 1.0} if outcome == "complete" else {"other": 1.0})
    monkeypatch.setattr(Distributor, "submit", lambda *_, **__: run)
    tell = optuna.Study.tell

    def interrupted(study, *arguments, **options):
        tell(study, *arguments, **options)
        monkeypatch.setattr(optuna.Study, "tell", tell)
        raise KeyboardInterrupt

    monkeypatch.setattr(optuna.Study, "tell", interrupted)
    study = search({"x": [1]})
    assert study.interrupted
    assert [trial.outcome for trial in study.table] == [outcome]


class Interrupting:
    """Ctrl-C comes while a callback handles the end of the study."""

    def on_study_end(self, study):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_the_first_ctrl_c_returns_the_study_also_while_callbacks_end(search, caplog):
    study = search({"x": [1]}, callbacks=[Interrupting()])
    assert study.interrupted
    assert [trial.outcome for trial in study.table] == ["complete"] * 2
    assert "the sweep was interrupted while callbacks ended" in caplog.text


def test_the_second_ctrl_c_is_raised_also_while_callbacks_end(search, monkeypatch):
    monkeypatch.setattr(_Slots, "free", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        search({"x": [1]}, callbacks=[Interrupting()])


def test_a_trial_that_fails_after_a_signal_begins_again_in_the_next_call(search, monkeypatch):
    """Its handler of SIGTERM raises, as an exception of the code does."""
    run = Ended({})
    run.result = Mock(side_effect=TrainingError("Stop: told to stop"))
    run.wait, run.terminate = lambda timeout=None: True, lambda: None
    looks = iter([True])

    def free(slots, active):
        if next(looks, None) is None:
            raise SystemExit(143)
        return True

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Distributor, "submit", lambda *_, **__: run)
        patch.setattr(_Slots, "free", free)
        patch.setattr("distributor.search.sweep._Search._await", lambda *_: None)
        search({"x": [1]}, trials=2)
    assert states(search) == ["RUNNING"]


def test_a_trial_that_could_not_start_begins_again_in_the_next_call(search, monkeypatch):
    """It would otherwise count, and with as many calls as trials nothing would be left to try."""
    run = Ended({})
    run.result = Mock(side_effect=StartError("waiting for executors"))
    with monkeypatch.context() as patch, pytest.raises(StartError, match="waiting for executors"):
        patch.setattr(Distributor, "submit", lambda *_, **__: run)
        search({"x": [1]}, trials=1)
    assert states(search) == ["RUNNING"]
    assert [(trial.number, trial.outcome) for trial in search({"x": [1]}, trials=1).table] == [(0, "complete")]


@pytest.mark.parametrize("end", [jvm_ended("a1"), context_stopped("a1", by_user=True)], ids=["jvm", "context"])
def test_trials_whose_session_ended_begin_again_in_the_next_call(search, monkeypatch, end):
    both = threading.Barrier(2)

    class Lost(Ended):
        def result(self):
            if threading.current_thread() is not threading.main_thread():
                both.wait(watch.DEADLINE)
            raise end

    with monkeypatch.context() as patch, pytest.raises(type(end), match="session|JVM"):
        patch.setattr(Distributor, "submit", lambda *_, **__: Lost({}))
        patch.setattr(_Slots, "free", lambda slots, active: True)
        search({"x": [1]}, trials=2)
    assert states(search) == ["RUNNING"] * 2
    assert [trial.outcome for trial in search({"x": [1]}).table] == ["complete"] * 2


def test_no_trial_finds_another_ones_files(search, monkeypatch, tmp_path):
    """What is in ``output_dir`` is copied to each node before a run."""
    folders = []

    def submit(distributor, *_, **__):
        folders.append(distributor._options.project.output_dir)
        return Ended({"loss": 1.0})

    monkeypatch.setattr(Distributor, "submit", submit)
    files = tmp_path / "files"
    files.mkdir()
    (files / "of-all-trials").write_bytes(bytes(2 << 20))
    search({"x": [1]}, output_dir=str(files), output_limit="1m")
    assert [folder.rpartition("-")[0] for folder in folders] == [f"{files}/kept/{number}" for number in (0, 1)]


def test_the_error_of_a_trial_keeps_nothing_of_its_run(search, monkeypatch):
    """A run has all its reports, and a study may have thousands of trials."""
    runs = []

    class Failed(Ended):
        def result(self):
            raise TrainingError("no")

    def submit(*_, **__):
        run = Failed({})
        runs.append(weakref.ref(run))
        return run

    monkeypatch.setattr(Distributor, "submit", submit)
    study = search({"x": [1]})
    assert [str(trial.error) for trial in study.table] == ["no"] * 2
    watch.until(lambda: gc.collect() >= 0 and all(run() is None for run in runs))
