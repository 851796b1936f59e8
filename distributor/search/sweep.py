"""Searches for the parameters of a training: one thread asks Optuna, starts runs, and tells Optuna their values."""

from __future__ import annotations

import math
import os
import queue
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distributor.api.distributor import Distributor
from distributor.api.identity import target_name
from distributor.api.scheduling import choose_scheduler, choose_session
from distributor.display.choose import choose_trials
from distributor.errors import (
    ConfigurationError,
    DistributorError,
    NodeLostError,
    PreemptionError,
    RunCancelledError,
    StartError,
    StopError,
    TrainingError,
)
from distributor.machine import devices, processes
from distributor.metrics.table import Metrics, Row
from distributor.outcomes.driver_failures import is_session_end
from distributor.run.callback_thread import Callbacks
from distributor.run.handle import Run, slots_are_wanted
from distributor.run.interrupt import plain_interrupts
from distributor.search.kept import (
    ERROR,
    ID,
    METRIC,
    PARAMETERS,
    RUN_ID,
    TARGET,
    Kept,
    is_begun,
    of_optuna,
    trial_folder,
)
from distributor.search.live import Live
from distributor.search.space import distributions, is_changed, suggest
from distributor.search.study import Study, Trial
from distributor.text import notices
from distributor.values.checks import check_count, check_title
from distributor.values.job import Job
from distributor.values.trial_info import TrialInfo

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

    from distributor.schedulers.base import Scheduler

_INTERVAL = 0.1  # seconds between looks at free slots

_FIRST = 5  # trials whose failure ends the search, if no earlier one has ended otherwise

_WINDOW, _TOO_MANY = 20, 16  # of the last trials, how many failures end it later

_starting = threading.Lock()  # of a trial: another search of this process looks at slots before it or after

#: Failures for which the function that trains is not to blame.
_BLAMELESS = (NodeLostError, PreemptionError, RunCancelledError, StartError)


def sweep(
    distributor: Distributor,
    train: Any,
    space: Mapping[str, Any],
    *,
    metric: tuple[str, Literal["min", "max"]],
    trials: int,
    at_once: int | None = None,
    name: str | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
    storage: optuna.storages.BaseStorage | None = None,
) -> Study:
    """Search for the best parameters of a training with Optuna. Each trial is a run of its own.

    A trial starts once its slots are free; with a range as ``num_processes``, it has the smallest number of ranks.
    Failed trials are recorded, and the search goes on, unless the first 5 all fail, or 16 of the last 20: then it
    raises the first error. Lost nodes, preemptions and slots that never came do not count.

    The first Ctrl-C cancels all trials and returns the study so far; a second one raises KeyboardInterrupt.

    Args:
        distributor: how each trial runs. Its checkpoints and ``output_dir`` are in a subfolder for each trial. Its
            callbacks serve all trials, one call at a time.
        train: a function, which gets the parameters as keyword arguments, or a script, which gets ``--lr 0.1 ...``.
        space: what to choose from, by the names of parameters: :func:`uniform`, :func:`log_uniform`,
            :func:`int_range`, or a list of texts and numbers.
        metric: the name under which ranks report the value of a trial (``runtime.report``), and ``"min"`` or ``"max"``.
            The last value of the lowest reporting rank counts.
        trials: how many trials to run.
        at_once: how many run at the same time (default: as many as slots allow; in local mode, as many as the cores
            allow, or with ``use_gpu`` the GPUs).
        name: keeps the study, so that another driver goes on with it: it counts the trials that have ended, and begins
            those again that had not, with the same number, parameters and checkpoints. One driver at a time has it.
        sampler: Optuna's sampler (default: ``TPESampler(constant_liar=True)``). One that ends the search, such as
            ``GridSampler``, ends it without an error.
        pruner: Optuna's pruner (default: prunes nothing). It is told the reports that have a step. A pruned trial is
            asked to stop as by ``run.stop(timeout=grace_period)``.
        storage: Optuna's storage for the study (default with ``name``: a file beside the checkpoints or, if these are
            behind a URL or not kept, in the folder ``DISTRIBUTOR_RUNS``).

    Raises:
        ConfigurationError: an argument is wrong, Optuna is not installed, or the study of this name is of another
            function, script, metric or space.
        StartError: another driver has the study, or a trial could not start while no other ran.
        TrainingError: too many trials failed; this is the first one's error.

    Example:
        >>> study = sweep(Distributor(2), train, {"lr": log_uniform(1e-4, 1e-1)}, metric=("loss", "min"), trials=20)
        ... # doctest: +SKIP
        >>> study.best.params  # doctest: +SKIP
        {'lr': 0.0123}
    """
    try:
        import optuna
    except ImportError:
        raise ConfigurationError(
            "sweep needs optuna, which is not installed: pip install 'distributor[sweep]'"
        ) from None
    if not isinstance(distributor, Distributor):
        raise ConfigurationError(f"sweep needs a Distributor, not {distributor!r}")
    if distributor._options.request.name is not None:
        raise ConfigurationError(
            f"the distributor of a sweep has no name= ({distributor._options.request.name!r}): each trial gets its own"
        )
    if not (isinstance(metric, (tuple, list)) and len(metric) == 2 and metric[1] in ("min", "max")):
        raise ConfigurationError(
            f"metric must be a name and 'min' or 'max', such as ('val/loss', 'min'), not {metric!r}"
        )
    for option, value, kind, such in (
        ("sampler", sampler, optuna.samplers.BaseSampler, "TPESampler()"),
        ("pruner", pruner, optuna.pruners.BasePruner, "MedianPruner()"),
    ):
        if not (value is None or isinstance(value, kind)):
            raise ConfigurationError(
                f"{option} must be one of Optuna's, such as optuna.{option}s.{such}, not {value!r}"
            )
    if isinstance(train, (str, os.PathLike)) and Path(train).is_fifo():
        raise ConfigurationError(
            f"the script {os.fspath(train)!r} is a pipe, which only the first trial could read: write it to a file"
        )
    at_once = None if at_once is None else check_count("at_once", at_once)
    asked = distributions(space), (metric[0], metric[1]), check_count("trials", trials), at_once
    name = None if name is None else check_title("name", name)
    kept = Kept.of(distributor._options.project.checkpoints, name, storage)
    with plain_interrupts(), kept.held(_job(distributor), asked[1]) as lost:
        return _Search(distributor, train, *asked, kept, sampler, pruner, lost).run()


@dataclass
class _Active:
    """A trial whose run has not ended."""

    trial: optuna.Trial
    run: Run
    pruned: bool = False
    rank: float = math.inf  # the lowest that has reported the metric
    known: dict[int, float] = field(default_factory=dict)  # the values that Optuna knows, by step


class _Search:
    def __init__(
        self,
        distributor: Distributor,
        train: Any,
        space: Mapping[str, BaseDistribution],
        metric: tuple[str, Literal["min", "max"]],
        trials: int,
        at_once: int | None,
        kept: Kept,
        sampler: optuna.samplers.BaseSampler | None,
        pruner: optuna.pruners.BasePruner | None,
        lost: list[str],
    ) -> None:
        import optuna

        self._states = optuna.trial.TrialState
        self._train = train
        self._space = dict(space)
        self._metric = metric
        self._wanted = min(trials, _size(sampler, space))
        self._kept = kept
        self._lost = lost  # in words, that another driver has taken the study
        self._optuna = kept.study(
            metric,
            optuna.samplers.TPESampler(constant_liar=True) if sampler is None else sampler,
            optuna.pruners.NopPruner() if pruner is None else pruner,
        )
        self._prunes = pruner is not None
        self._warned = False  # that nothing is pruned
        self._remembered = False  # in the study, what it is of
        self._stopped = threading.Event()  # by a sampler that has tried everything
        setattr(self._optuna, "stop", self._stopped.set)  # noqa: B010  # Optuna's own works only inside optimize()
        self.study = Study(kept.name, metric, self._optuna, self._identify())
        there = self._optuna.get_trials()
        if there:
            self._optuna.sampler.reseed_rng()
        self._check(there)
        earlier = [each for each in there if is_begun(each)]
        self._begun = len(earlier)
        self._adopted = [each for each in earlier if not each.state.is_finished()]
        for each in earlier:
            if each.state.is_finished():
                self.study.add(of_optuna(each))
        self._events: queue.SimpleQueue[tuple[int, tuple[Row, ...] | None]] = queue.SimpleQueue()
        self._active: dict[int, _Active] = {}
        self._failed: list[bool] = []  # of each trial that has ended, but for failures without blame
        self._first_error: Exception | None = None
        lock = threading.Lock()
        self._callbacks = [_OneAtATime(each, lock) for each in distributor._options.request.callbacks]
        self._distributor = distributor._narrowest()
        self._slots = _Slots(self._distributor, at_once)
        self._live = Live(self.study, self._wanted, choose_trials() if distributor._options.output.progress else None)

    @property
    def _identity(self) -> dict[str, str]:
        """What the study keeps with its first trial that begins, so that a later call cannot take it for another."""
        return {
            METRIC: self._metric[0],
            TARGET: target_name(self._train),
            PARAMETERS: ", ".join(sorted(self._space)),
        }

    def _check(self, there: Sequence[optuna.trial.FrozenTrial]) -> None:
        """Check that the study can go on with what is asked now, before any trial begins."""
        kept = {**self._identity, **self._optuna.user_attrs}
        metric = kept[METRIC], self._optuna.direction.name.lower()[:3]
        changed = [(f"metric={metric!r}", f"{self._metric!r}")] if metric != self._metric else []
        for key, what in ((TARGET, "the function or script"), (PARAMETERS, "the parameters")):
            if kept[key] != self._identity[key]:
                changed.append((f"{what} {kept[key]!r}", f"{self._identity[key]!r}"))
        for name, now in self._space.items():
            earlier = (each.distributions[name] for each in there if name in each.distributions)
            if (before := next((each for each in earlier if is_changed(each, now)), None)) is not None:
                changed.append((f"{name} from {before}", f"{now}"))
        if changed:
            before, now = changed[0]
            raise ConfigurationError(
                f"the study {self.study.name!r} was begun with {before}, and cannot go on with {now}: pass that, or "
                "another name="
            )

    def run(self) -> Study:
        """Search to the end, and return the study."""
        try:
            while self._more or self._active:
                with _starting:
                    if begins := self._more and self._slots.free([each.run for each in self._active.values()]):
                        self._start()
                self._live.look({number: (each.run, each.trial.params) for number, each in self._active.items()})
                self._handle(0.0 if begins else _INTERVAL)
        except KeyboardInterrupt:
            self.study.interrupted = True
            self._end("the sweep was interrupted (interrupt again to end it at once)")
            notices.logger.warning("the sweep was interrupted; it returns the trials so far")
        except BaseException as error:
            self.study.error = error
            self._end("the sweep has ended with an error", save=not isinstance(error, Exception))
            raise
        finally:
            self._close()
        return self.study

    def _close(self) -> None:
        """End what shows the search, and the callbacks; the first Ctrl-C ends the wait for them."""
        try:
            self._live.close()
            if not self._lost:  # otherwise, another driver goes on with the study
                Callbacks(self._callbacks, f"study {self.study.name}", lambda: ()).end_study(self.study)
        except KeyboardInterrupt:
            if self.study.interrupted:
                raise
            self.study.interrupted = True
            notices.logger.warning("the sweep was interrupted while callbacks ended; it returns all trials")

    def _identify(self) -> str:
        """Return the identifier of the study, which its first driver makes up."""
        if ID not in self._optuna.user_attrs:
            self._optuna.set_user_attr(ID, secrets.token_hex(6))
        return str(self._optuna.user_attrs[ID])

    @property
    def _more(self) -> bool:
        """Whether another trial is wanted."""
        return bool(self._adopted) or (self._begun < self._wanted and not self._stopped.is_set())

    def _start(self) -> None:
        import optuna

        known: dict[int, float] = {}
        if self._adopted:
            frozen = self._adopted.pop(0)
            trial, known = optuna.trial.Trial(self._optuna, frozen._trial_id), dict(frozen.intermediate_values)
        else:
            trial = self._optuna.ask()
            self._begun += 1
        try:
            run = self._submit(trial.number, self._params(trial))
        except Exception:
            if RUN_ID not in trial.user_attrs:  # otherwise it goes on in a later call, which may ask what can be done
                with suppress(Exception):  # of the storage; the first error says more
                    self._optuna.tell(trial.number, state=self._states.FAIL)
            raise
        self._active[trial.number] = _Active(trial, run, known=known)
        trial.set_user_attr(RUN_ID, run.id)
        if not self._remembered:
            self._remembered = True
            for key, value in self._identity.items():
                self._optuna.set_user_attr(key, value)
        threading.Thread(target=self._await, args=(trial.number, run), name="distributor-trial", daemon=True).start()

    def _params(self, trial: optuna.Trial) -> dict[str, Any]:
        try:
            return suggest(trial, self._space)
        except ValueError as error:
            raise ConfigurationError(
                f"trial {trial.number} of the study {self.study.name!r} cannot choose from this space: {error}. Pass "
                "the space= that the study was begun with, which must have what is enqueued, or another name="
            ) from error

    def _submit(self, number: int, params: Mapping[str, Any]) -> Run:
        args = [text for name, value in params.items() for text in _option(name, str(value))]
        is_script = isinstance(self._train, (str, os.PathLike))
        project = self._distributor._options.project
        checkpoints, output_dir = project.checkpoints, project.output_dir
        if checkpoints is not None:
            checkpoints = replace(checkpoints, dir=trial_folder(checkpoints.dir, self.study.name, number, params))
        if output_dir is not None:
            output_dir = trial_folder(output_dir, self.study.name, number, params)
        distributor = self._distributor._with(
            checkpoints=checkpoints,
            output_dir=output_dir,
            progress=False,
            callbacks=(*self._callbacks, _Listener(number, self._events)),
            cpus_per_process=self._slots.cpus,
            trial=TrialInfo(number, params, self.study.name, self.study.id),
        )
        return distributor.submit(self._train, *(args if is_script else ()), **({} if is_script else params))

    def _await(self, number: int, run: Run) -> None:
        with suppress(Exception):  # nobody else asks for its error, which the table shows
            run.result()
        self._events.put((number, None))

    def _handle(self, patience: float) -> None:
        """Wait ``patience`` seconds for news of trials, and take all, since a look at free slots calls Spark often."""
        if self._lost:
            raise RunCancelledError(f"the study {self.study.name!r} was taken: {self._lost[0]}")
        with suppress(queue.Empty):
            self._take(*self._events.get(timeout=patience))
            for _ in range(self._events.qsize()):
                self._take(*self._events.get_nowait())

    def _take(self, number: int, rows: tuple[Row, ...] | None) -> None:
        """Take a trial's reports, or that it has ended."""
        active = self._active.get(number)
        if active is None:  # a callback that was left running has gone on
            return
        if rows is not None:
            self._report(active, rows)
            return
        trial = self._ended(active)
        if self._prunes and active.known and not active.run._reports_live and not self._warned:
            self._warned = True
            notices.logger.warning(
                "%s: nodes cannot reach the driver, so reports come only when a trial has ended, and nothing is pruned",
                self.study.name,
            )
        self.study.add(trial)
        stuck = isinstance(trial.error, StartError) and len(self._active) == 1
        final = trial.error if stuck or is_session_end(trial.error) else None  # no other trial would start either
        if final is None:  # otherwise, a later call begins a kept one again
            self._tell(trial)
        del self._active[number]
        self._live.ended(trial, active.run)
        if final is not None:
            raise final
        self._judge(trial)

    def _report(self, active: _Active, rows: tuple[Row, ...]) -> None:
        """Feed the pruner with the reports of the lowest rank, each step once; without one, note the last of them."""
        told = [
            (row.rank, row.step, row.values[self._metric[0]])
            for row in rows
            if self._metric[0] in row.values and row.step is not None and row.step >= 0
        ]
        if not self._prunes:
            lowest = min((rank for rank, _, _ in told), default=0)
            told = [each for each in told if each[0] == lowest][-1:] if self._kept.resumes else []
        for rank, step, value in told:
            if active.pruned or rank > active.rank:
                continue
            active.rank = rank
            if step in active.known:
                continue
            active.known[step] = value
            active.trial.report(value, step)
            if self._prunes and active.run._reports_live and active.trial.should_prune() and not active.run.wait(0):
                active.pruned = True
                active.run.stop(timeout=self._distributor._options.deadlines.grace_period)

    def _ended(self, active: _Active) -> Trial:
        """Return the record of a trial whose run has ended."""
        run, error, name = active.run, None, self._metric[0]
        try:
            run.result()
        except DistributorError as failure:
            error = failure.with_traceback(None)  # its frames would keep the run, with all its reports
        value = _last_value(run, name)
        if value is None and active.known:  # an earlier driver has seen it end, but was killed before it told Optuna
            value = active.known[max(active.known)]
        made = Trial(active.trial.number, active.trial.params, "complete", value, run.snapshot().seconds, None, run.id)
        if active.pruned and (run._halted if error is None else isinstance(error, (RunCancelledError, StopError))):
            return replace(made, outcome="pruned")
        if isinstance(error, RunCancelledError):
            return replace(made, outcome="cancelled", error=error)
        if error is None and (value is None or math.isnan(value)):
            reported = ", ".join(run.metrics.names) or "nothing"
            what = "never reported" if value is None else "last reported NaN as"
            error = TrainingError(
                f"trial {made.number} {what} {name!r}, the metric of the sweep; it reported {reported}"
            )
        return made if error is None else replace(made, outcome="failed", error=error)

    def _tell(self, trial: Trial) -> None:
        value, state = trial.value, self._states.COMPLETE
        if trial.outcome != "complete":
            value, state = None, self._states.PRUNED if trial.outcome == "pruned" else self._states.FAIL
        with suppress(RuntimeError):  # Optuna knows that the trial has ended: Ctrl-C came just after an earlier call
            if trial.error is not None and trial.number in self._active:
                self._active[trial.number].trial.set_user_attr(ERROR, str(trial.error))
        self._optuna.tell(trial.number, value, state, skip_if_finished=True)

    def _judge(self, trial: Trial) -> None:
        """Raise the first error if too many trials have failed."""
        if isinstance(trial.error, _BLAMELESS):
            return
        self._failed.append(trial.error is not None)
        self._first_error = self._first_error or trial.error
        if self._first_error is not None and too_many(self._failed):
            raise self._first_error

    def _end(self, why: str, *, save: bool = False) -> None:
        """Cancel all trials, or let them ``save``, and wait for their ends. If interrupted meanwhile, kill them."""
        try:
            for active in self._active.values():
                if save:  # a signal handler has raised, as the command's does on SIGTERM
                    active.run.terminate()
                else:
                    active.run.cancel(why)
            for active in self._active.values():
                active.run.wait()
                if not self._lost:  # otherwise, the study is another driver's
                    trial = self._ended(active)
                    if save and trial.outcome != "pruned" and (trial.error is not None or active.run._halted):
                        trial = replace(trial, outcome="cancelled", error=None)  # early, whatever its code then does
                    self.study.add(trial)
                    goes_on = trial.outcome == "cancelled" or is_session_end(trial.error)
                    if not (goes_on and self._kept.resumes):
                        self._tell(trial)
                    self._live.ended(trial, active.run)
            self._active.clear()
        except BaseException as error:
            if not isinstance(error, Exception):  # a second signal
                for active in self._active.values():
                    active.run.kill()
            raise
        finally:
            if not self._kept.resumes:  # otherwise, the next driver adopts those that have not ended
                for frozen in self._optuna.get_trials(deepcopy=False, states=(self._states.RUNNING,)):
                    self._optuna.tell(frozen.number, state=self._states.FAIL)


def _option(name: str, text: str) -> tuple[str, ...]:
    """Return an option of a script: with "=" if ``argparse`` would take its value for another option.

    >>> _option("shift", "-0.5"), _option("shift", "-1e-05")
    (('--shift', '-0.5'), ('--shift=-1e-05',))
    """
    joined = text.startswith("-") and re.fullmatch(r"-\d*\.?\d+", text) is None
    return (f"--{name}={text}",) if joined else (f"--{name}", text)


def _last_value(run: Run, name: str) -> float | None:
    """Return the last value of a metric: the lowest rank's, of the last attempt that has reported it."""
    if name in (newest := run.latest_metrics):
        return newest[name]
    rows = [row for row in run.metrics if name in row.values]
    last = max((row.attempt for row in rows), default=0)
    return Metrics(tuple(row for row in rows if row.attempt == last)).latest.get(name)


def too_many(failed: Sequence[bool]) -> bool:
    """Return whether a search ends, of whose trials some have ``failed``, in the order of their ends.

    >>> too_many([True] * 5), too_many([True] * 4 + [False] + [True] * 11), too_many([True] * 4 + [False] + [True] * 12)
    (True, False, True)
    """
    return (len(failed) == _FIRST and all(failed)) or sum(failed[-_WINDOW:]) >= _TOO_MANY


def _size(sampler: optuna.samplers.BaseSampler | None, space: Mapping[str, BaseDistribution]) -> float:
    """Return after how many trials a sampler has begun all that it can.

    Grid and brute force end a search themselves, but only once all have ended, and until then repeat some that run.
    """
    from optuna import distributions, samplers

    if isinstance(sampler, samplers.GridSampler):
        return int(sampler._n_min_trials)
    if not isinstance(sampler, samplers.BruteForceSampler):
        return math.inf
    return math.prod(
        len(each.choices) if isinstance(each, distributions.CategoricalDistribution) else each.high - each.low + 1
        for each in space.values()
        if isinstance(each, (distributions.CategoricalDistribution, distributions.IntDistribution))
    )


class _Slots:
    """Whether the slots of another trial are free."""

    def __init__(self, distributor: Distributor, at_once: int | None) -> None:
        resources = distributor._options.resources
        session, _ = choose_session(distributor.local_mode, distributor.use_gpu)
        self._scheduler: Scheduler = choose_scheduler(session, distributor.use_gpu)
        self._width = width = resources.num_processes
        self._job = _job(distributor)
        self.cpus = resources.cpus_per_process
        self._contends = not self._scheduler.on_driver or resources.use_gpu  # CPUs of this machine are not awaited
        self._counts = self._contends and self._scheduler.reports_slots
        if self._scheduler.on_driver:
            self._scheduler.shape(resources)  # finds the GPUs
            each = resources.cpus_per_process or 1
            cores = processes.cpu_count()
            most = len(devices.local_gpus(os.environ)) // (width * resources.gpus_each) if resources.use_gpu else 0
            at_once = at_once or max(1, most or cores // (width * each))
            if self.cpus is None and width <= cores:
                self.cpus = max(1, cores // (at_once * width))
        elif at_once is None and not self._counts:
            room = self._scheduler.room(self._job)
            if room is None:
                raise ConfigurationError(
                    "Spark Connect does not say how many slots there are: pass at_once=, or set "
                    "spark.executor.instances and spark.executor.cores"
                )
            at_once = max(1, room // width)
        self._at_once = at_once

    def free(self, active: list[Run]) -> bool:
        """Return whether another trial can start beside the ``active`` ones."""
        if self._at_once is not None and len(active) >= self._at_once:
            return False
        if self._contends and slots_are_wanted(on_driver=self._scheduler.on_driver, beside=active):
            return False
        if not self._counts or not active:  # a trial alone waits for its slots itself, with a deadline
            return True
        coming = sum(run.num_processes for run in active if not run._holds_slots)
        return (self._scheduler.room(self._job) or 0) - coming >= self._width


def _nothing() -> None:
    """Stand for the function of a trial where only its slots matter."""


def _job(distributor: Distributor) -> Job:
    """Return a job like a trial's, without its folders: they would be packed, and ``output_dir`` has all trials'."""
    return distributor._with(working_dir=None, output_dir=None).plan(_nothing)


@dataclass(frozen=True)
class _Listener:
    """The callback that brings a trial's reports to the search."""

    number: int
    events: queue.SimpleQueue[tuple[int, tuple[Row, ...] | None]]

    def on_metrics(self, run: Run, rows: tuple[Row, ...]) -> None:
        self.events.put((self.number, rows))


@dataclass(frozen=True)
class _OneAtATime:
    """A user's callback, whose calls by several runs never overlap."""

    callback: Any
    lock: threading.Lock

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The callback's: warnings name it."""
        return type(self.callback)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.callback, name)
        if not callable(method):
            return method

        def locked(*arguments: Any) -> Any:
            with self.lock:
                return method(*arguments)

        return locked
