"""The callback for MLflow: notes on the driver's disk what a run reports, which a thread of its own sends."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from distributor.errors import ConfigurationError
from distributor.metrics.table import Row
from distributor.run.handle import Run
from distributor.text import notices
from distributor.tracking.history import default_folder
from distributor.tracking.lowest import LowestRank
from distributor.tracking.mlflow_sender import Sender, Server, SpoolDelivery
from distributor.tracking.spool import LogFiles, Params, RunBegun, RunEnded, Spool, Tags, Values
from distributor.values.job import Status

_PATIENCE = 50.0  # seconds that a run waits at its end for what is unsent

_STATUS = {Status.SUCCEEDED: "FINISHED", Status.CANCELLED: "KILLED"}


class MLflow:
    """A callback that brings a run to an MLflow server: arguments, metrics, versions, placement, checkpoints by path.

    Only the driver talks to the server, in a thread of its own; executors need no credentials. What is unsent lies on
    the driver's disk, so that a server that is down or slow delays nothing but the end, by at most a minute. The next
    ``MLflow`` for this server on this machine sends it first.

    A run is one run in MLflow, however often its ranks start again, and so is a training with ``name=`` and
    ``checkpoints=`` across drivers. Each metric has the values of the lowest rank that reports it. The first value of a
    name and step stays, since MLflow cannot replace it. An argument that a later run has changed is a tag,
    ``changed.epochs``. A study of :func:`sweep` is the parent of its trials.

    Args:
        experiment: the name of the experiment, which is created if needed (default: MLflow's).
        tracking_uri: the server, such as ``"http://host:5000"``, ``"sqlite:///mlflow.db"`` or ``"databricks"``
            (default: as MLflow has it, such as from ``MLFLOW_TRACKING_URI``).

    Raises:
        ConfigurationError: mlflow is not installed.

    Example:
        >>> Distributor(4, name="digits", callbacks=[MLflow(experiment="/digits")]).run(train)  # doctest: +SKIP
    """

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        if find_spec("mlflow") is None:
            raise ConfigurationError(
                "MLflow needs mlflow, which is not installed: pip install 'distributor[mlflow]', or mlflow itself"
            )
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        self._uri = tracking_uri
        self._where = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "the default place"
        digest = hashlib.sha256(f"{self._where} {self._experiment}".encode()).hexdigest()[:16]
        self._folder = default_folder() / ".mlflow" / digest
        self._sender = Sender(self._folder, self._connect, self._where)
        self._runs: dict[str, _Tracked] = {}  # by the id of the run

    def __repr__(self) -> str:
        return f"MLflow({self._experiment!r}, {self._where!r})"

    def _connect(self) -> tuple[Any, Server]:
        from mlflow import MlflowClient

        client = MlflowClient(self._uri)
        return client, Server(client, self._where, self._experiment)

    def on_start(self, run: Run) -> None:
        if run._job.identity is None:  # otherwise, only its lease tells which training it continues
            self._tracked(run)

    def on_metrics(self, run: Run, rows: Sequence[Row]) -> None:
        tracked = self._tracked(run)
        tracked.describe(run)
        tracked.report(tracked.lowest.choose(rows))
        self._sender.wake()

    def on_checkpoint(self, run: Run, checkpoint: Any) -> None:
        path, step = checkpoint.path, str(checkpoint.step)
        self._tracked(run).tag({"distributor.checkpoint": path, "distributor.checkpoint.step": step})

    def on_attempt_end(self, run: Run, attempt: Any) -> None:
        self._tracked(run).tag({f"distributor.attempt.{attempt.number}": str(attempt)})

    def on_end(self, run: Run) -> None:
        tracked = self._tracked(run)
        tracked.describe(run)
        tracked.report(tracked.lowest.choose((), last=True))
        error = {} if run.error is None else {"distributor.error": str(run.error).partition("\n")[0]}
        tracked.tag({"distributor.goodput": str(run.goodput), **error})
        if run.log_folder is not None:
            tracked.delivery.spool.append(LogFiles(str(run.log_folder)))
        tracked.delivery.spool.append(RunEnded(_STATUS.get(run.status, "FAILED"), run.ended or time.time()))

    def on_study_end(self, study: Any) -> None:
        best = study.best
        spool = Spool.create(self._folder, RunBegun(study.id, None, study.name, time.time(), os.getcwd(), study.name))
        found = {} if best is None else {"distributor.best": str(best.number), "distributor.best.run": best.run_id}
        spool.append(Tags({"distributor.trials": str(len(study.table)), **found}))
        if best is not None:
            spool.append(Params({f"best.{name}": str(value) for name, value in best.params.items()}))
            spool.append(Values(None, time.time(), {study.metric[0]: best.value}))
        spool.append(RunEnded("KILLED" if study.interrupted else "FINISHED", time.time()))
        self._runs[study.id] = _Tracked(self._sender.add(spool))

    def on_close(self, ended: Any) -> None:
        """Wait until what is unsent has been sent; trials leave it to the end of their study."""
        if isinstance(ended, Run):
            if ended.trial is not None:
                return
            finished = [self._runs.pop(ended.id)] if ended.id in self._runs else []
        else:
            finished = list(self._runs.values())
            self._runs.clear()
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

    def _tracked(self, run: Run) -> _Tracked:
        if run.id not in self._runs:
            trial = run.trial
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
            spool.append(Params({name: str(value) for name, value in run.arguments.items()}))
            tags = {f"distributor.version.{name}": version for name, version in run.versions.items()}
            spool.append(Tags({**tags, "distributor.run": run.id}))
            self._runs[run.id] = _Tracked(self._sender.add(spool))
        return self._runs[run.id]


@dataclass
class _Tracked:
    """A run and what of it has been noted."""

    delivery: SpoolDelivery
    lowest: LowestRank = field(default_factory=LowestRank)
    placement: str | None = None

    def tag(self, tags: Mapping[str, str]) -> None:
        self.delivery.spool.append(Tags(tags))

    def report(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = {name: value if abs(value) < float("inf") else str(value) for name, value in row.values.items()}
            self.delivery.spool.append(Values(row.step, row.time, values))

    def describe(self, run: Run) -> None:
        """Note where the ranks run, if it has changed."""
        placement = None if run.placement is None else str(run.placement)
        if placement not in (None, self.placement):
            self.placement = placement
            assert placement is not None
            self.tag({"distributor.placement": placement, "distributor.num_processes": str(run.num_processes)})
