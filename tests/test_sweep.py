"""Searches with real Optuna: on this machine, and as tasks of two executors."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import watch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from sessions import Make

from distributor import (
    ConfigurationError,
    NodeLostError,
    ResourceError,
    Run,
    StartError,
    Status,
    TorchDistributor,
    TrainingError,
    int_range,
    log_uniform,
    runs,
    sweep,
    uniform,
)
from distributor.run import events
from distributor.values.job import warmth

sweeping = importlib.import_module("distributor.search.sweep")  # the package's name is the function's

GOAL = ("loss", "min")


def squared(x: float) -> None:
    """Rank 1 reports too, what does not count."""
    from distributor import runtime

    rank = int(os.environ["RANK"])
    runtime.report(step=0, loss=100.0)
    runtime.report(step=1, loss=x * x + rank)


@pytest.mark.slow
@pytest.mark.long_on_executors
def test_the_lowest_ranks_last_report_is_a_trials_value(make: Make) -> None:
    study = sweep(make(2), squared, {"x": uniform(-1, 1)}, metric=GOAL, trials=4, at_once=2)
    assert [trial.outcome for trial in study.table] == ["complete"] * 4
    for trial in study.table:
        assert trial.value == pytest.approx(trial.params["x"] ** 2)
    assert study.best is not None and study.best.value == min(trial.value for trial in study.table)
    assert study.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert len(repr(study.table).splitlines()) == 5
    assert runs().active == []


class Most:
    """A callback that notes how many trials ran at the same time, as they report it, and overlaps of its own calls."""

    def __init__(self) -> None:
        self.most = self.inside = self.overlaps = 0

    def on_metrics(self, run: Run, rows: Any) -> None:
        self.inside += 1
        self.overlaps += self.inside > 1
        self.most = max(self.most, *(row.values["at_once"] for row in rows))
        self.inside -= 1


def meet(folder: str, number: int) -> None:
    """Report once as many trials as fit are there."""
    from distributor import runtime

    def count(kind: str) -> int:
        return len(list(Path(folder).glob(f"{kind}-*")))

    Path(folder, f"begin-{number}").touch()
    if number < 2:
        watch.until(lambda: count("begin") >= 2)
    runtime.report(loss=number, at_once=count("begin") - count("end"))
    Path(folder, f"end-{number}").touch()


class Told:
    """A callback that notes which trials there are, and the end of the study."""

    def __init__(self) -> None:
        self.trials: list[Any] = []
        self.ended: list[Any] = []

    def on_start(self, run: Run) -> None:
        self.trials.append(run.trial)

    def on_study_end(self, study: Any) -> None:
        self.ended.append((study.name, len(study.table)))


def test_callbacks_know_trials_and_the_end_of_the_study(make_local: Make, tmp_path: Path) -> None:
    def search(trials: int) -> Told:
        told = Told()
        distributor = make_local(1, callbacks=[told], checkpoints=tmp_path)
        study = sweep(distributor, squared, {"x": uniform(-1, 1)}, metric=GOAL, trials=trials, name="told", at_once=1)
        params = {trial.number: trial.params for trial in study.table}
        assert all(trial.params == params[trial.number] for trial in told.trials)
        return told

    first, second = search(2), search(3)
    assert [trial.number for trial in first.trials] == [0, 1]
    assert [trial.number for trial in second.trials] == [2]
    assert {trial.study for trial in first.trials} == {"told"}
    assert len({trial.study_id for trial in (*first.trials, *second.trials)}) == 1
    assert (first.ended, second.ended) == ([("told", 2)], [("told", 3)])


class Breaking(Told):
    def on_study_end(self, study: Any) -> None:
        raise KeyError("no such server")


def test_an_error_at_the_end_of_a_study_is_a_warning(make_local: Make, caplog: pytest.LogCaptureFixture) -> None:
    study = sweep(
        make_local(1, callbacks=[Breaking(), told := Told()]), squared, {"x": uniform(0, 1)}, metric=GOAL, trials=1
    )
    assert told.ended == [(study.name, 1)]
    assert f"study {study.name}: Breaking.on_study_end raised KeyError: 'no such server'" in caplog.text


@pytest.mark.spark
def test_as_many_trials_run_as_slots_are_free(two_executors: Any, tmp_path: Path) -> None:
    most = Most()
    space = {"folder": [str(tmp_path)], "number": [0, 1, 2, 3]}
    sampler = optuna.samplers.GridSampler(space)
    study = sweep(
        TorchDistributor(2, False, False, callbacks=[most]), meet, space, metric=GOAL, trials=9, sampler=sampler
    )
    assert sorted(trial.params["number"] for trial in study.table) == [0, 1, 2, 3]
    assert 1 <= most.most <= 2
    assert most.overlaps == 0


def pass_by(number: int, folder: str) -> None:
    """The first trials end only when they are told."""
    from distributor import runtime

    Path(folder, f"trial-{number}").touch()
    if number < 4:
        watch.until(lambda: Path(folder, f"end-{number}").exists())
    runtime.report(loss=number)


def passed(folder: str) -> int:
    return len(list(Path(folder).glob("trial-*")))


@pytest.mark.spark
@pytest.mark.slow
def test_trials_let_a_run_pass_that_waits_for_slots_of_the_cluster(
    two_executors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    looks: list[int] = []  # free slots at each look for those of another trial, while fewer than four run
    free = sweeping._Slots.free

    def look(slots: Any, active: list[Run]) -> bool:
        looks.append(slots._scheduler.room(slots._job))
        return free(slots, active)

    monkeypatch.setattr(sweeping._Slots, "free", look)

    def ask() -> None:
        watch.until(lambda: passed(str(tmp_path)) == 4)
        run = TorchDistributor(4, False, False).submit(passed, str(tmp_path))
        watch.until(lambda: run._wants_slots(on_driver=False))
        looks.clear()
        (tmp_path / "end-0").touch()
        watch.until(lambda: looks.count(1) >= 3)
        for number in (1, 2, 3):
            (tmp_path / f"end-{number}").touch()
        ended.extend(run.results(watch.DEADLINE))

    thread = threading.Thread(target=ask)
    thread.start()
    space = {"number": list(range(8)), "folder": [str(tmp_path)]}
    one_core = TorchDistributor(1, False, False)
    study = sweep(one_core, pass_by, space, metric=GOAL, trials=8, sampler=InOrder())
    thread.join(watch.DEADLINE)
    assert [trial.outcome for trial in study.table] == ["complete"] * 8
    assert ended == [4] * 4  # no further trial had begun


class InOrder(optuna.samplers.RandomSampler):
    """Chooses of a list by the trial's number."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return distribution.choices[trial.number % len(distribution.choices)]


class AtOnce:
    """A callback that notes, when a run starts, how many have started and not yet written their file to ``done``."""

    def __init__(self, done: Path) -> None:
        self.done = done
        self.numbers: list[int] = []

    def on_start(self, run: Run) -> None:
        self.numbers.append(len(self.numbers) + 1 - len(list(self.done.iterdir())))


def squared_and_done(x: float, done: str) -> None:
    squared(x)
    Path(done, str(x)).touch()


@pytest.mark.slow
@pytest.mark.usefixtures("fake_gpus")
def test_no_trial_waits_for_gpus_that_others_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever ``at_once`` says: after the start timeout, it would count as failed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    distributor = TorchDistributor(1, local_mode=True, progress=False, callbacks=[at_once := AtOnce(tmp_path)])
    space = {"x": uniform(0, 1), "done": [str(tmp_path)]}
    study = sweep(distributor, squared_and_done, space, metric=GOAL, trials=6, at_once=6)
    assert [trial.outcome for trial in study.table] == ["complete"] * 6
    assert max(at_once.numbers) <= 2


@pytest.mark.spark
def test_a_search_that_needs_too_many_slots_is_refused(two_executors: Any) -> None:
    wide = TorchDistributor(64, False, False, start_timeout=3)
    with pytest.raises(ResourceError, match="num_processes=64 needs 64 task slots"):
        sweep(wide, squared, {"x": uniform(0, 1)}, metric=("loss", "min"), trials=3)


def test_a_study_keeps_its_metric(make_local: Make, tmp_path: Path) -> None:
    def search(metric: str) -> Any:
        distributor = make_local(1, checkpoints=tmp_path)
        return sweep(distributor, squared, {"x": uniform(0, 1)}, metric=(metric, "min"), trials=1, name="kept")

    search("loss")
    with pytest.raises(ConfigurationError, match=r"metric=\('loss', 'min'\).*cannot go on with \('other', 'min'\)"):
        search("other")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("kind", ["grid", "brute force"])
def test_a_sampler_that_has_tried_everything_ends_the_search(make_local: Make, kind: str) -> None:
    space = {"x": [0.0, 0.5, 1.0]}
    sampler = optuna.samplers.GridSampler(space) if kind == "grid" else optuna.samplers.BruteForceSampler()
    study = sweep(make_local(1), squared, space, metric=GOAL, trials=10, at_once=2, sampler=sampler)
    assert sorted(trial.params["x"] for trial in study.table) == [0.0, 0.5, 1.0]


def fail_above(x: int, limit: int) -> None:
    from distributor import runtime

    if x > limit:
        raise ValueError(f"{x} is too much")
    runtime.report(loss=x)


def test_failed_trials_are_recorded_and_the_search_goes_on(make_local: Make) -> None:
    space = {"x": [0, 1, 2, 3], "limit": [1]}
    sampler = optuna.samplers.GridSampler(space)
    study = sweep(make_local(1), fail_above, space, metric=GOAL, trials=4, at_once=1, sampler=sampler)
    assert {trial.params["x"]: trial.outcome for trial in study.table} == {
        0: "complete",
        1: "complete",
        2: "failed",
        3: "failed",
    }
    failed = next(trial for trial in study.table if trial.params["x"] == 2)
    assert isinstance(failed.error, TrainingError) and "2 is too much" in str(failed.error)
    states = [trial.state for trial in study.optuna.get_trials()]
    assert states.count(optuna.trial.TrialState.FAIL) == 2


@pytest.mark.slow
def test_a_search_whose_first_five_trials_fail_ends_with_the_first_error(make_local: Make) -> None:
    with pytest.raises(TrainingError, match="7 is too much"):
        sweep(make_local(1), fail_above, {"x": [7], "limit": [1]}, metric=GOAL, trials=50, at_once=1)
    assert runs().active == []


def test_a_trial_without_the_metric_fails_and_says_what_was_reported(make_local: Make) -> None:
    study = sweep(make_local(1), squared, {"x": [0.0]}, metric=("val/loss", "min"), trials=1)
    (trial,) = study.table
    assert trial.outcome == "failed" and study.best is None
    assert "trial 0 never reported 'val/loss', the metric of the sweep; it reported loss" in str(trial.error)


def until_stopped(depth: int) -> None:
    """The smallest depth is good at once, and ends; others go on until they are asked to stop."""
    from distributor import runtime

    for step in range(100_000):
        time.sleep(0.01)  # of training
        runtime.report(step=step, loss=float(depth))
        if runtime.should_stop(step) or (depth == 1 and step == 3):
            return


def test_a_pruned_trial_stops_early(make_local: Make) -> None:
    space = {"depth": [1, 2]}
    pruner = optuna.pruners.ThresholdPruner(upper=1.5)
    sampler = optuna.samplers.GridSampler(space)
    options = {"metric": GOAL, "trials": 2, "at_once": 1, "sampler": sampler, "pruner": pruner}
    study = sweep(make_local(2), until_stopped, space, **options)
    assert {trial.params["depth"]: trial.outcome for trial in study.table} == {1: "complete", 2: "pruned"}
    pruned = next(trial for trial in study.optuna.get_trials() if trial.state is optuna.trial.TrialState.PRUNED)
    assert pruned.value == 2.0


def never_stop(x: float) -> None:
    from distributor import runtime

    runtime.report(step=1, loss=x)
    threading.Event().wait()


def test_a_pruned_trial_that_does_not_stop_is_cancelled_and_counts_as_pruned(make_local: Make) -> None:
    pruner = optuna.pruners.ThresholdPruner(upper=1.5)
    options: Any = {"metric": GOAL, "trials": 1, "at_once": 1, "pruner": pruner}
    study = sweep(make_local(1, grace_period=1), never_stop, {"x": [2.0]}, **options)
    (trial,) = study.table
    assert (trial.outcome, trial.value, trial.error) == ("pruned", 2.0, None)


def report_and_end(folder: str) -> None:
    """Report what is pruned, and end by itself once it must be known."""
    from distributor import runtime

    runtime.report(step=1, loss=2.0)
    watch.until(lambda: Path(folder, "known").exists())
    runtime.report(step=2, loss=1.0)


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_metrics(self, run: Run, rows: Any) -> None:
        watch.until(lambda: isinstance(run._supervisor.state.wish, events.Halt) or run.wait(0))
        self.path.touch()


def test_a_trial_that_ends_by_itself_before_it_stops_is_complete(make_local: Make, tmp_path: Path) -> None:
    pruner = optuna.pruners.ThresholdPruner(upper=1.5)
    callbacks = [NotFirst(Touch(tmp_path / "known"))]
    options: Any = {"metric": GOAL, "trials": 1, "at_once": 1, "pruner": pruner}
    study = sweep(make_local(1, callbacks=callbacks), report_and_end, {"folder": [str(tmp_path)]}, **options)
    (trial,) = study.table
    assert (trial.outcome, trial.value) == ("complete", 1.0)


class NotFirst:
    """Calls another callback in a thread, since the search hears of reports after the user's callbacks."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def on_metrics(self, run: Run, rows: Any) -> None:
        threading.Thread(target=self.callback.on_metrics, args=(run, rows), daemon=True).start()


def report_twice(x: int) -> None:
    from distributor import runtime

    runtime.report(step=1, loss=2.0)
    runtime.report(step=2, loss=2.0 + x)


@pytest.mark.spark
@pytest.mark.slow
def test_without_a_channel_nothing_is_pruned_and_that_is_said_once(
    two_executors: Any, unreachable: None, caplog: pytest.LogCaptureFixture
) -> None:
    pruner = optuna.pruners.ThresholdPruner(upper=1.5)
    options: Any = {"metric": GOAL, "trials": 2, "at_once": 2, "pruner": pruner}
    study = sweep(TorchDistributor(1, False, False), report_twice, {"x": [1]}, **options)
    assert [(trial.outcome, trial.value) for trial in study.table] == [("complete", 3.0)] * 2
    assert caplog.text.count("reports come only when a trial has ended, and nothing is pruned") == 1


def meet_the_next(number: int, folder: str) -> None:
    """The first of five trials ends once four run, and the others once the last runs beside them."""
    from distributor import runtime

    Path(folder, str(number)).touch()
    watch.until(lambda: len(os.listdir(folder)) >= (4 if number == 0 else 5))
    runtime.report(loss=1.0)


@pytest.mark.spark
@pytest.mark.slow
def test_without_a_channel_trials_have_all_slots(two_executors: Any, unreachable: None, tmp_path: Path) -> None:
    """The driver never hears that they run, but Spark has started their tasks."""
    space = {"number": list(range(5)), "folder": [str(tmp_path)]}
    one_core = TorchDistributor(1, False, False)
    study = sweep(one_core, meet_the_next, space, metric=GOAL, trials=5, sampler=InOrder())
    assert [trial.outcome for trial in study.table] == ["complete"] * 5


def lose_the_node(x: int) -> None:
    """The first six trials lose their node; others succeed or fail."""
    from distributor import runtime

    if x < 6:
        os.kill(psutil.Process().parent().ppid(), signal.SIGKILL)  # the agent
        threading.Event().wait()
    runtime.report(loss=x)


@pytest.mark.slow
def test_lost_nodes_do_not_count_as_failures_of_the_function(make_local: Make) -> None:
    options: Any = {"metric": GOAL, "trials": 7, "at_once": 2, "sampler": InOrder()}
    study = sweep(make_local(1, grace_period=1), lose_the_node, {"x": list(range(7))}, **options)
    assert [trial.outcome for trial in study.table] == ["failed"] * 6 + ["complete"]
    assert isinstance(study.table[0].error, NodeLostError)


@pytest.mark.long
def test_16_failures_of_the_last_20_end_the_search_with_the_first_error(make_local: Make) -> None:
    space = {"x": [1, 7, 8, 9, 10], "limit": [5]}  # in turn: one in five succeeds
    with pytest.raises(TrainingError, match="7 is too much"):
        sweep(make_local(1), fail_above, space, metric=GOAL, trials=50, at_once=1, sampler=InOrder())


@pytest.mark.slow
def test_a_seeded_sampler_is_reseeded_when_a_study_goes_on(make_local: Make, tmp_path: Path) -> None:
    def search(trials: int) -> Any:
        options: Any = {"metric": GOAL, "trials": trials, "name": "seeded", "at_once": 1}
        distributor = make_local(1, checkpoints=tmp_path)
        return sweep(distributor, squared, {"x": uniform(0, 1)}, sampler=optuna.samplers.RandomSampler(0), **options)

    search(2)
    assert len({trial.params["x"] for trial in search(4).table}) == 4


@pytest.mark.slow
def test_trials_share_a_warm_process_and_nothing_of_them_is_in_their_environment(make_local: Make) -> None:
    jobs: list[Any] = []

    class Spy:
        def on_start(self, run: Run) -> None:
            jobs.append(run._job)

    before = watch.warm_processes()
    options: Any = {"metric": GOAL, "trials": 3, "at_once": 1}
    study = sweep(make_local(1, callbacks=[Spy()], env={"MINE": "1"}), squared, {"x": [1.0]}, **options)
    assert [trial.outcome for trial in study.table] == ["complete"] * 3
    assert [job.env for job in jobs] == [jobs[0].env] * 3
    assert [warmth(job) for job in jobs] == [warmth(jobs[0])] * 3
    assert not any(word in f"{jobs[0].env}" for word in (study.name, *(trial.run_id for trial in study.table)))
    assert len(set(watch.warm_processes()) - set(before)) == 1


class Table:
    """A view of a search that notes what it is shown."""

    interval = 0.0
    announces = False

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.closed: list[Any] = []

    def show(self, snapshot: Any) -> None:
        self.shown.append(snapshot)

    def close(self, snapshot: Any) -> None:
        self.closed.append(snapshot)


@pytest.mark.slow
def test_a_search_is_shown_while_it_goes_on(make_local: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    monkeypatch.setattr(sweeping, "choose_trials", lambda: table)
    options: Any = {"metric": GOAL, "trials": 2, "at_once": 1, "sampler": InOrder()}
    study = sweep(make_local(2, progress=True), squared, {"x": [0.5, 0.25]}, **options)
    assert any(row.is_live and row.params == {"x": 0.25} for snapshot in table.shown for row in snapshot.rows)
    (last,) = table.closed
    assert study.best is not None and last.best == study.best.number == 1
    assert [(row.number, row.state, row.step, row.value) for row in last.rows] == [
        (0, "complete", 1, 0.25),
        (1, "complete", 1, 0.0625),
    ]
    sweep(make_local(2, progress=False), squared, {"x": [0.5]}, metric=GOAL, trials=1)
    assert len(table.closed) == 1


def save(x: int) -> None:
    from distributor import runtime

    state = {"x": -1}
    loaded = runtime.load_checkpoint(state)
    runtime.save_checkpoint({"x": x}, step=1)
    runtime.report(loss=float(x if loaded is None else -1))


@pytest.mark.slow
def test_no_trial_loads_another_ones_checkpoint(make_local: Make, tmp_path: Path) -> None:
    study = sweep(make_local(1, checkpoints=tmp_path), save, {"x": int_range(1, 3)}, metric=GOAL, trials=3, at_once=1)
    assert [trial.outcome for trial in study.table] == ["complete"] * 3, study.table
    assert all(trial.value == trial.params["x"] for trial in study.table)
    assert len(list(tmp_path.glob(f"{study.name}/*-*"))) == 3


def write(x: int) -> None:
    from distributor import runtime

    Path("model.txt").write_text(str(x))
    runtime.report(loss=float(x))


def test_each_trial_has_its_own_files(make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = sweep(make_local(1, output_dir="out"), write, {"x": [1, 2]}, metric=GOAL, trials=2, at_once=1)
    there = {trial.number: [*Path("out", study.name).glob(f"{trial.number}-*/*")] for trial in study.table}
    assert {number: [file.read_text() for file in files] for number, files in there.items()} == {
        trial.number: [str(trial.params["x"])] for trial in study.table
    }


DRIVER = """
import sys
sys.path[:0] = {path!r}
import test_sweep
from distributor import TorchDistributor, sweep
distributor = TorchDistributor(1, True, False, checkpoints={folder!r}, grace_period=1)
sweep(distributor, test_sweep.go_on, {{"x": [1, 2, 3, 4], "folder": [{folder!r}]}}, metric=("loss", "min"), trials=3,
      at_once=1, name="search")
"""


def go_on(x: int, folder: str) -> None:
    """The second trial of a search saves, and waits; begun again, it goes on."""
    from distributor import runtime

    state = {"x": -1}
    loaded = runtime.load_checkpoint(state)
    first = Path(folder, "first")
    if loaded is None:
        runtime.save_checkpoint({"x": x}, step=1)
        if first.exists():
            Path(folder, "waits").touch()
            threading.Event().wait()
        first.touch()
    runtime.report(loss=float(x if loaded is None else state["x"]))


@pytest.mark.slow
def test_the_next_driver_adopts_the_trials_of_one_that_was_killed(make_local: Make, tmp_path: Path) -> None:
    folder = str(tmp_path)
    code = DRIVER.format(path=[str(Path(__file__).parent), *sys.path], folder=folder)
    driver = subprocess.Popen([sys.executable, "-c", code])
    watch.until(lambda: (tmp_path / "waits").exists())
    space: dict[str, Any] = {"x": [1, 2, 3, 4], "folder": [folder]}
    options: Any = {"metric": GOAL, "trials": 3, "at_once": 1, "name": "search"}
    with pytest.raises(StartError, match="is held by"):
        sweep(make_local(1, checkpoints=folder), go_on, space, **options)
    driver.kill()
    driver.wait()
    (tmp_path / "first").unlink()
    study = sweep(make_local(1, checkpoints=folder), go_on, space, **options)
    assert [(trial.number, trial.outcome) for trial in study.table] == [(n, "complete") for n in range(3)]
    assert all(trial.value == trial.params["x"] for trial in study.table)
    assert len(list((tmp_path / "search").glob("*-*/step-*"))) == 3
    again = sweep(make_local(1, checkpoints=folder), go_on, space, **options)
    assert [trial.run_id for trial in again.table] == [trial.run_id for trial in study.table]
    with pytest.raises(ConfigurationError, match="cannot go on with"):
        sweep(make_local(1, checkpoints=folder), go_on, space, **{**options, "metric": ("loss", "max")})


def report_once(folder: str) -> None:
    """Reports its only step in the first of its runs."""
    from distributor import runtime

    if runtime.load_checkpoint({"x": 0}) is None:
        runtime.report(step=-1, loss=2.0)
        runtime.report(step=1, loss=0.5)
        runtime.save_checkpoint({"x": 1}, step=1, wait=True)


@pytest.mark.slow
def test_a_trial_that_had_ended_before_its_driver_was_killed_has_its_value(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributor, options = make_local(1, checkpoints=tmp_path), {"trials": 1, "at_once": 1, "name": "search"}

    def killed(self: Any, trial: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr("distributor.search.sweep._Search._tell", killed)
        sweep(distributor, report_once, {"folder": [""]}, metric=GOAL, **options)
    study = sweep(distributor, report_once, {"folder": [""]}, metric=GOAL, **options)
    assert [(trial.outcome, trial.value) for trial in study.table] == [("complete", 0.5)]


IN_STORAGE = """
import sys
sys.path[:0] = {path!r}
import optuna, test_sweep
from distributor import TorchDistributor, sweep
sweep(TorchDistributor(1, True, False, grace_period=1), test_sweep.wait_at_first, {{"folder": [{folder!r}]}},
      metric=("loss", "min"), trials=1, name="search", storage=optuna.storages.RDBStorage({url!r}))
"""


@pytest.mark.long
def test_a_driver_that_has_a_study_in_a_storage_is_seen_wherever_the_storage_is(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url = tmp_path / "trial", f"sqlite:///{tmp_path}/study.db"
    folder.mkdir()
    code = IN_STORAGE.format(path=[str(Path(__file__).parent), *sys.path], folder=str(folder), url=url)
    driver = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "DISTRIBUTOR_RUNS": str(tmp_path / "a")})
    watch.until(lambda: len(os.listdir(folder)) > 0)
    monkeypatch.setenv("DISTRIBUTOR_RUNS", str(tmp_path / "b"))
    options: Any = {"metric": GOAL, "trials": 1, "name": "search", "storage": optuna.storages.RDBStorage(url)}
    with pytest.raises(StartError, match="the study 'search' is held by run .* or pass another name"):
        sweep(make_local(1), wait_at_first, {"folder": [str(folder)]}, **options)
    driver.kill()
    driver.wait()
    (folder / "again").touch()
    study = sweep(make_local(1), wait_at_first, {"folder": [str(folder)]}, **options)
    assert [(trial.number, trial.outcome) for trial in study.table] == [(0, "complete")]


def wait_at_first(folder: str) -> None:
    """Wait for ever, until it is begun again."""
    from distributor import runtime

    if not Path(folder, "again").exists():
        wait_for_ever(folder)
    runtime.report(loss=0.0)


def wait_for_ever(folder: str) -> None:
    Path(folder, os.environ["MASTER_PORT"]).touch()
    threading.Event().wait()


def test_ctrl_c_cancels_all_trials_and_returns_the_study(make_local: Make, tmp_path: Path) -> None:
    def interrupt() -> None:
        watch.until(lambda: len(os.listdir(tmp_path)) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    options: Any = {"metric": GOAL, "trials": 5, "at_once": 2}
    study = sweep(make_local(1, grace_period=1), wait_for_ever, {"folder": [str(tmp_path)]}, **options)
    thread.join()
    assert study.interrupted
    assert [trial.outcome for trial in study.table] == ["cancelled"] * 2
    assert runs().active == []
    assert all(trial.state.is_finished() for trial in study.optuna.get_trials())


def wait_or_report(folder: str) -> None:
    """Wait for ever at first, as a trial that has saved once; later, go on from there."""
    from distributor import runtime

    state = {"x": 0}
    if runtime.load_checkpoint(state) is None:
        runtime.save_checkpoint({"x": 1}, step=1, wait=True)
        wait_for_ever(folder)
    runtime.report(loss=float(state["x"]))


@pytest.mark.slow
def test_trials_that_ctrl_c_has_cancelled_go_on_in_the_next_call(make_local: Make, tmp_path: Path) -> None:
    folder = tmp_path / "begun"
    folder.mkdir()

    def interrupt() -> None:
        watch.until(lambda: len(os.listdir(folder)) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    distributor = make_local(1, grace_period=1, checkpoints=tmp_path)
    options: Any = {"metric": GOAL, "trials": 2, "at_once": 2, "name": "search"}
    study = sweep(distributor, wait_or_report, {"folder": [str(folder)]}, **options)
    thread.join()
    assert [trial.outcome for trial in study.table] == ["cancelled"] * 2
    again = sweep(distributor, wait_or_report, {"folder": [str(folder)]}, **options)
    assert [(trial.outcome, trial.value) for trial in again.table] == [("complete", 1.0)] * 2


def ignore_sigterm(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for_ever(folder)


def test_a_second_ctrl_c_ends_the_search_at_once(make_local: Make, tmp_path: Path) -> None:
    def interrupt() -> None:
        watch.until(lambda: len(os.listdir(tmp_path)) == 1)
        os.kill(os.getpid(), signal.SIGINT)
        watch.until(lambda: [run.status for run in runs().active] == [Status.STOPPING])
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    options: Any = {"metric": GOAL, "trials": 2, "at_once": 1}
    with pytest.raises(KeyboardInterrupt):
        sweep(make_local(1, grace_period=600), ignore_sigterm, {"folder": [str(tmp_path)]}, **options)
    thread.join()
    watch.until(lambda: runs().active == [])


def test_a_script_gets_its_parameters_as_options(make_local: Make, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse\nfrom distributor import runtime\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--learning-rate', type=float)\nruntime.report(loss=parser.parse_args().learning_rate)\n"
    )
    study = sweep(make_local(1), str(script), {"learning-rate": log_uniform(1e-4, 1e-1)}, metric=GOAL, trials=1)
    assert study.table[0].value == study.table[0].params["learning-rate"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"space": {}}, "space must be a dict such as"),
        ({"space": {"lr": 0.1}}, "space: lr must be uniform"),
        ({"space": {"learning rate": [1]}}, "'learning rate' is not the name of a parameter"),
        ({"space": {"--lr": [1]}}, "'--lr' is not the name of a parameter"),
        ({"space": {"learning-rate": [1]}}, "cannot be called with these arguments"),
        ({"metric": "loss"}, "metric must be a name and 'min' or 'max'"),
        ({"trials": 0}, "trials must be"),
        ({"at_once": 0}, "at_once must be"),
        ({"sampler": optuna.samplers.TPESampler}, r"sampler must be one of Optuna's, such as .*TPESampler\(\)"),
        ({"pruner": "median"}, r"pruner must be one of Optuna's, such as .*MedianPruner\(\), not 'median'"),
    ],
)
def test_refuses_wrong_arguments(make_local: Make, changed: dict[str, Any], why: str) -> None:
    asked: dict[str, Any] = {"space": {"x": [0]}, "metric": GOAL, "trials": 1, **changed}
    with pytest.raises(ConfigurationError, match=why):
        sweep(make_local(1), squared, asked.pop("space"), **asked)


def test_refuses_a_distributor_with_a_name(make_local: Make) -> None:
    with pytest.raises(ConfigurationError, match="has no name="):
        sweep(make_local(1, name="digits"), squared, {"x": [0.0]}, metric=GOAL, trials=1)


@pytest.mark.parametrize("low_high", [(1, 0), (0, 1), (-1, 1), (True, 2), ("a", 1)])
def test_refuses_ranges_that_are_none(low_high: Any) -> None:
    with pytest.raises(ConfigurationError):
        log_uniform(*low_high)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "distributor", "sweep", "--local", "--no-gpu", "--metric", "loss:min", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=watch.DEADLINE)


@pytest.mark.slow
def test_the_command_prints_the_table_of_its_trials(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nfrom distributor import runtime\nruntime.report(loss=float(sys.argv[2]))\n")
    ended = command(str(script), "--space", "lr=uniform:1:2", "--trials", "2", "--at-once", "1")
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[:2] for line in ended.stdout.splitlines()] == [
        ["trial", "outcome"],
        ["0", "complete"],
        ["1", "complete"],
    ]


@pytest.mark.slow
def test_ctrl_c_ends_the_command_with_130_and_the_table(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import threading\nprint('trains', flush=True)\nthreading.Event().wait()\n")
    arguments = ["--metric", "loss:min", "--space", "lr=1,2", "--trials", "2", "--at-once", "1", "--grace-period", "1"]
    line = [sys.executable, "-m", "distributor", "sweep", "--local", "--no-gpu", *arguments, str(script)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()  # a trial runs
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=watch.DEADLINE)
    assert process.returncode == 130, err
    assert out.splitlines()[-1].split()[:2] == ["0", "cancelled"]
    assert "the sweep was interrupted; it returns the trials so far" in err


@pytest.mark.slow
def test_after_sigterm_the_commands_trials_stop_together_and_save(tmp_path: Path) -> None:
    script, saved = tmp_path / "train.py", tmp_path / "saved"
    script.write_text(
        "import itertools, pathlib, time\nfrom distributor import runtime\n"
        "for step in itertools.count():\n"
        "    if runtime.should_stop(step):\n        break\n"
        "    if step == 0:\n        print('trains', flush=True)\n"
        "    time.sleep(0.01)\n"
        f"runtime.report(step=step, loss=1.0)\npathlib.Path({str(saved)!r}).touch()\n"
    )
    arguments = ["--metric", "loss:min", "--space", "lr=1,2", "--trials", "2", "--at-once", "1", "--name", "search"]
    line = [sys.executable, "-m", "distributor", "sweep", "--local", "--no-gpu", *arguments, "--checkpoints"]
    process = subprocess.Popen([*line, str(tmp_path), str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()  # a trial runs
    process.terminate()
    process.communicate(timeout=watch.DEADLINE)
    assert process.returncode == 128 + signal.SIGTERM
    assert saved.exists()
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "search" / "study.journal")))
    (trial,) = optuna.load_study(study_name="search", storage=storage).get_trials()
    assert trial.state is optuna.trial.TrialState.RUNNING  # the same command goes on with it


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--space", "lr=log:0:1", "--trials", "2"], "log_uniform needs numbers above 0"),
        (["--space", "lr=log:1", "--trials", "2"], "--space takes lr=log:LOW:HIGH"),
        (["--space", "lr=int:a:2", "--trials", "2"], "--space takes lr=log:LOW:HIGH"),
        (["--space", "lr=1,2"], "--trials"),
        (["--space", "lr=1,2", "--trials", "2", "--metric", "loss"], "--metric takes NAME:min or NAME:max"),
        (["--space", "lr=1,2", "--trials", "2", "--name", "a", "--resume", "must"], "No such option '--resume'"),
    ],
)
def test_the_command_refuses_what_is_wrong(arguments: list[str], why: str) -> None:
    ended = command("train.py", *arguments)
    assert ended.returncode == 2 and why in ended.stderr, ended.stderr
