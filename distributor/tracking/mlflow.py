"""The callback for MLflow: notes on the driver's disk what a run reports, which a thread of its own sends."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distributor.errors import ConfigurationError
from distributor.metrics.driver import NodeSample
from distributor.metrics.rank import DATA_WAIT
from distributor.metrics.table import Row, TrackedRow
from distributor.run.handle import Run
from distributor.text import notices
from distributor.text.secret import is_secret
from distributor.text.wording import without_password, without_user
from distributor.tracking.history import default_folder
from distributor.tracking.lowest import LowestRank
from distributor.tracking.mlflow_sender import (
    ERROR,
    LONGEST_PARAM,
    LONGEST_TAG,
    SUBMITTED,
    Sender,
    Server,
    SpoolDelivery,
)
from distributor.tracking.spool import LogFolder, Params, RunBegun, RunEnded, Spool, Tags, Values
from distributor.values.checkpoints import Checkpoints, check_checkpoints
from distributor.values.checks import check_flag
from distributor.values.job import Status

if TYPE_CHECKING:
    import torch

_START_PATIENCE = 5.0  # seconds that a run waits at its start for its id, if rank 0 can join it

_PATIENCE = 50.0  # seconds that a run waits at its end for what is unsent

#: Places that are the same from each current folder; ``sqlite:///mlflow.db`` is not.
_IS_ANYWHERE = re.compile(r"[\w+.-]+://[^/]|sqlite:////|file:///|/|databricks")

_LOOK = 0.02  # seconds between two checks for the id

_STATUS = {Status.SUCCEEDED: "FINISHED", Status.CANCELLED: "KILLED"}


class MLflow:
    """A callback that brings a run to an MLflow server: arguments, metrics, versions, placement, checkpoints by path.

    Only the driver talks to the server, in a thread of its own; executors need no credentials. What is unsent lies on
    the driver's disk, so that a server that is down or slow delays nothing but the end, by at most a minute. What this
    callback leaves when its process ends, the next ``MLflow`` for this server on this machine sends first.

    A run is one run in MLflow, however often its ranks start again, and so is a training with ``name=`` and
    ``checkpoints=`` across drivers. Each metric has the values of the lowest rank that reports it. The first value of a
    name and step stays, since MLflow cannot replace it. An argument that a later run has changed is a tag,
    ``changed.epochs``. A study of :func:`sweep` is the parent of its trials.

    In ranks, ``mlflow.autolog()`` and a Trainer's ``report_to="mlflow"`` make no other run. If ranks have this server,
    by ``MLFLOW_TRACKING_URI``, and it answers soon, rank 0 logs to this run, and the driver leaves to it what a Trainer
    logs. Otherwise they do nothing, since what Trainers log is reported. Runs that the code has started itself, with
    ``mlflow.start_run``, or that ``MLFLOW_RUN_ID`` names for rank 0, stay.

    Args:
        experiment: the name of the experiment, which is created if needed (default: MLflow's).
        tracking_uri: the server, such as ``"http://host:5000"``, ``"sqlite:///mlflow.db"`` or ``"databricks"``
            (default: as MLflow has it, such as from ``MLFLOW_TRACKING_URI``).
        system_metrics: whether the load of each node is tracked, every 10 s, as ``system/<node rank>/<name>`` with
            MLflow's names, such as ``system/0/cpu_utilization_percentage`` (default: no). GPUs are those that
            nvidia-smi shows on the node's host. A node that cannot reach the driver sends none.
        register: the name of a registered model, which gets a version after each run that succeeds, and after a sweep
            one of its best trial (default: none). The run waits for this without a limit; Ctrl-C ends the wait.
        model: a function without arguments that returns the module. The driver calls it, and loads the entry ``model``,
            or the only module, of the best checkpoint; of the last one without ``Checkpoints(best=...)``.
        example: an input of the module: an array or tensor, or a tuple of these. The model is then registered with a
            signature, as pt2 (``torch.export``). Without an example, or if it does not export, it is pickled.

    Raises:
        ConfigurationError: mlflow is not installed, or ``register`` and ``model`` are not a name and a function.

    Example:
        >>> Distributor(4, name="digits", callbacks=[MLflow(experiment="/digits")]).run(train)  # doctest: +SKIP
    """

    def __init__(
        self,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        *,
        system_metrics: bool = False,
        register: str | None = None,
        model: Callable[[], torch.nn.Module] | None = None,
        example: Any = None,
    ) -> None:
        if find_spec("mlflow") is None:
            raise ConfigurationError(
                "MLflow needs mlflow, which is not installed: pip install 'distributor[mlflow]', or mlflow itself"
            )
        _check_registering(register, model, example)
        self._register, self._model, self._example = register, model, example
        self.system_metrics = check_flag("MLflow: system_metrics", system_metrics)
        self._registering: set[str] = set()  # ids of runs and studies
        name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        ours = name is None and tracking_uri in (None, os.environ.get("MLFLOW_TRACKING_URI"))
        self._id = os.environ.get("MLFLOW_EXPERIMENT_ID") if ours else None  # as mlflow.set_experiment() sets it
        self._experiment = name or ("Default" if self._id is None else f"experiment {self._id}")
        self._uri = tracking_uri
        self._server = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._where = without_user(self._server or "the default place")
        here = "" if _IS_ANYWHERE.match(self._where) else os.getcwd()
        digest = hashlib.sha256(f"{self._where} {self._experiment} {here}".encode()).hexdigest()[:16]
        self._folder = default_folder() / ".mlflow" / digest
        self._sender = Sender(self._folder, self._connect, self._where)
        self._runs: dict[str, _Tracked] = {}  # by the id of the run
        self._adding = threading.Lock()
        self._late: SpoolDelivery | None = None  # the last one whose id did not come while a run's start waited for it

    def __repr__(self) -> str:
        return f"MLflow({self._experiment!r}, {self._where!r})"

    def _connect(self) -> tuple[Any, Server]:
        from mlflow import MlflowClient

        client = MlflowClient(self._uri)
        return client, Server(client, self._where, self._experiment, self._id)

    @property
    def takes_long(self) -> bool:
        """Whether a run waits for this callback without a limit."""
        return bool(self._registering)

    def register_model(self, checkpoints: str | Checkpoints, run_id: str) -> str:
        """Register the model of the best or last checkpoint, as a run does after its success; return its version.

        Args:
            checkpoints: the folder or URL with the checkpoints, or ``Checkpoints(dir, best=...)``.
            run_id: MLflow's id of the run that has made them, in which the model is logged.

        Raises:
            ConfigurationError: the callback has no ``register=``, or the module does not fit the checkpoint.
            OSError: there is no checkpoint that can be read here.
        """
        from distributor.tracking.mlflow_model import Registration

        if self._register is None or self._model is None:
            raise ConfigurationError("register_model needs MLflow(register=..., model=...)")
        checked = check_checkpoints("checkpoints", checkpoints)
        client, _ = self._connect()
        return Registration(self._register, self._model, self._example).register(client, run_id, checked)

    def run_for_ranks(self, run: Run, environ: Mapping[str, str], wanted: Callable[[], bool]) -> str:
        """Return MLflow's id of a run if ranks with these variables have this server; empty if it does not come soon.

        A server that has not answered once delays no other start until it does.
        """
        if self._server is None or environ.get("MLFLOW_TRACKING_URI") != self._server:
            return ""
        patience = _START_PATIENCE if self._late is None or self._late.run else 0.0
        tracked = self._tracked(run)
        delivery = tracked.delivery
        deadline = time.monotonic() + patience
        while delivery.run is None and time.monotonic() < deadline and wanted():
            time.sleep(_LOOK)
        tracked.is_joined = bool(found := delivery.run or "")
        if not found:
            self._late = delivery
        return found

    def on_start(self, run: Run) -> None:
        if run._job.identity is None:  # otherwise, only its lease tells which training it continues
            self._tracked(run)

    def on_metrics(self, run: Run, rows: Sequence[Row]) -> None:
        tracked = self._tracked(run)
        tracked.describe(run)
        tracked.report(tracked.lowest.choose(rows))

    def on_system_metrics(self, run: Run, samples: Sequence[NodeSample]) -> None:
        tracked = self._tracked(run)
        for each in samples:
            values = {f"system/{each.node_rank}/{name}": value for name, value in each.values.items()}
            tracked.delivery.spool.append(Values(None, each.time, values))

    def on_checkpoint(self, run: Run, checkpoint: Any) -> None:
        path, step = checkpoint.path, str(checkpoint.step)
        self._tracked(run).tag({"distributor.checkpoint": path, "distributor.checkpoint.step": step})

    def on_attempt_end(self, run: Run, attempt: Any) -> None:
        self._tracked(run).tag({f"distributor.attempt.{attempt.number}": str(attempt)})

    def on_end(self, run: Run) -> None:
        tracked = self._tracked(run)
        tracked.checkpoints = run._current.checkpoints
        tracked.describe(run)
        tracked.report(tracked.lowest.choose((), last=True))
        error = {} if run.error is None else {ERROR: str(run.error).partition("\n")[0]}
        tracked.tag({"distributor.goodput": str(run.goodput), **error})
        if run.log_folder is not None:
            tracked.delivery.spool.append(LogFolder(str(run.log_folder)))
        tracked.delivery.spool.append(RunEnded(_STATUS.get(run.status, "FAILED"), run.ended or time.time()))

    def on_study_end(self, study: Any) -> None:
        best = study.best
        with self._adding:
            tracked = self._of_study(study.id, study.name)
        found = {} if best is None else {"distributor.best": str(best.number), "distributor.best.run": best.run_id}
        if study.error is not None:
            found[ERROR] = (str(study.error) or type(study.error).__name__).partition("\n")[0]
        tracked.tag({"distributor.trials": str(len(study.table)), **found})
        spool = tracked.delivery.spool
        if best is not None:
            params = {name: str(value) for name, value in best.params.items() if not is_secret(name, value)}
            spool.append(Params({f"best.{name}": value[:LONGEST_PARAM] for name, value in params.items()}))
            spool.append(Values.of(None, time.time(), {study.metric[0]: best.value}))
        is_killed = study.interrupted or not isinstance(study.error, Exception | None)
        status = "KILLED" if is_killed else "FINISHED" if study.error is None else "FAILED"
        spool.append(RunEnded(status, time.time()))

    def on_close(self, ended: Any) -> None:
        """Wait until what is unsent has been sent, and register; trials leave it to the end of their study."""
        if isinstance(ended, Run):
            if ended.trial is not None:
                return
            finished = [self._runs.pop(ended.id)] if ended.id in self._runs else []
            best = finished[0] if finished and ended.status is Status.SUCCEEDED else None
        else:
            is_whole = ended.best is not None and not ended.interrupted and ended.error is None
            best = self._runs.get(ended.best.run_id) if is_whole else None
            if self._register is not None and best is None and is_whole:
                notices.logger.warning(
                    "MLflow: no model is registered as %s, since the best trial, %s, ran in an earlier driver: call "
                    "register_model() of this callback with its folder of checkpoints and its run in MLflow",
                    self._register,
                    ended.best.number,
                )
            finished = [self._runs.pop(run) for run, each in list(self._runs.items()) if each.study == ended.id]
        if self._register is None or best is None:
            self._deliver(finished)
            return
        self._registering.add(ended.id)
        try:
            self._deliver(finished)
            self._try_register(best)
        finally:
            self._registering.discard(ended.id)

    def _deliver(self, finished: Sequence[_Tracked]) -> None:
        late = self._sender.wait([each.delivery for each in finished], _PATIENCE)
        if late:
            paths = ", ".join(str(each.spool.path) for each in late)
            notices.logger.warning(
                "MLflow at %s did not take all reports in %g s: they lie in %s. The next MLflow callback for this "
                "server on this machine sends them first",
                self._where,
                _PATIENCE,
                paths,
            )

    def _try_register(self, tracked: _Tracked) -> None:
        """Register the model of a run that has ended; if that fails, say so, with the call that does it later."""
        run, checkpoints = tracked.delivery.run, tracked.checkpoints
        if checkpoints is None:
            notices.logger.warning(
                "MLflow: no model is registered as %s, since the run has no checkpoints=", self._register
            )
            return
        try:
            if run is None or not tracked.delivery.done.is_set() or not tracked.delivery.is_awaited:
                raise OSError(f"MLflow at {self._where} has not taken all reports of the run yet")
            version = self.register_model(checkpoints, run)
        except Exception as error:  # of the user's function, of storage, of the server
            build = getattr(self._model, "__name__", "build")
            best = "" if checkpoints.best is None else f", best={checkpoints.best!r}"
            notices.logger.warning(
                "MLflow: the model of %s is not registered as %s: %s: %s. To register it later, where the checkpoints "
                "can be read: MLflow(%r, %r, register=%r, model=%s).register_model(Checkpoints(%r%s), %r)",
                checkpoints.dir,
                self._register,
                type(error).__name__,
                without_user(str(error).partition("\n")[0]),
                self._experiment,
                self._uri and self._where,
                self._register,
                build,
                checkpoints.dir,
                best,
                run or "the run's id",
            )
        else:
            notices.logger.info("MLflow: registered version %s of %s", version, self._register)

    def _tracked(self, run: Run) -> _Tracked:
        with self._adding:
            if run.id not in self._runs:
                self._runs[run.id] = self._add(run)
            return self._runs[run.id]

    def _of_study(self, id: str, name: str) -> _Tracked:
        """Return what is noted of a study, from its first trial on: who comes after this driver's death ends it."""
        if id not in self._runs:
            begin = RunBegun(id, None, name, time.time(), os.getcwd(), name)
            spool = Spool.create(self._folder, begin)
            spool.append(Tags({SUBMITTED: str(begin.time)}))
            self._runs[id] = _Tracked(self._sender.add(spool), id)
        return self._runs[id]

    def _add(self, run: Run) -> _Tracked:
        trial = run.trial
        if trial is not None:
            self._of_study(trial.study_id, trial.study)
        begin = RunBegun(
            run.id if trial is None else f"{trial.study_id}/{trial.number}",
            run.training_folder if trial is None else None,
            (run.name or run.id) if trial is None else f"{trial.study}/{trial.number}",
            run.submitted,
            os.getcwd(),
            run.snapshot().title,
            None if trial is None else trial.study,
            None if trial is None else trial.study_id,
        )
        spool = Spool.create(self._folder, begin)
        spool.append(Params({name: str(value)[:LONGEST_PARAM] for name, value in run.arguments.items()}))
        tags = {f"distributor.version.{name}": version for name, version in run.versions.items()}
        spool.append(Tags({**tags, "distributor.run": run.id, SUBMITTED: str(begin.time)}))
        return _Tracked(self._sender.add(spool), begin.study_key)


def _check_registering(register: Any, model: Any, example: Any) -> None:
    if register is None:
        if model is not None or example is not None:
            raise ConfigurationError("MLflow: model= and example= need register=, the name of the registered model")
        return
    if not isinstance(register, str) or not register.strip():
        raise ConfigurationError(f"MLflow: register must be the name of a registered model, not {register!r}")
    if model is None:
        raise ConfigurationError(f"MLflow: register={register!r} needs model=, a function that returns the module")
    if not callable(model) or (callable(getattr(model, "state_dict", None)) and not isinstance(model, type)):
        raise ConfigurationError(
            f"MLflow: model must be a function without arguments that returns the module, not a {type(model).__name__}"
        )


@dataclass
class _Tracked:
    """A run and what of it has been noted."""

    delivery: SpoolDelivery
    study: str | None  # its id, also of a study itself
    lowest: LowestRank = field(default_factory=LowestRank)
    placement: str | None = None
    checkpoints: Checkpoints | None = None  # once it has ended
    is_joined: bool = False  # rank 0 is told to log to it

    def tag(self, tags: Mapping[str, str]) -> None:
        """Note facts by name, such as paths and errors, but no password of a URL."""
        self.delivery.spool.append(Tags({name: without_password(text)[:LONGEST_TAG] for name, text in tags.items()}))

    def report(self, rows: Sequence[Row]) -> None:
        """Note rows, but leave to rank 0 what it has logged itself."""
        for row in rows:
            sent = row.values
            if isinstance(row, TrackedRow) and self.is_joined:
                sent = {name: sent[name] for name in sent if name == DATA_WAIT}
            if sent:
                self.delivery.spool.append(Values.of(row.step, row.time, sent))

    def describe(self, run: Run) -> None:
        """Note where the ranks run, if it has changed."""
        placement = None if run.placement is None else str(run.placement)
        if placement not in (None, self.placement):
            self.placement = placement
            assert placement is not None
            self.tag({"distributor.placement": placement, "distributor.num_processes": str(run.num_processes)})
