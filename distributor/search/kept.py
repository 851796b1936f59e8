"""Where a study is kept, and which driver has it: the next driver of its name goes on with it."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from distributor.errors import TrainingError
from distributor.machine.storage import is_url, open_storage
from distributor.run import lease
from distributor.search.study import Trial
from distributor.text import notices
from distributor.tracking.history import default_folder
from distributor.values.checkpoints import Checkpoints, absolute
from distributor.values.job import Job
from distributor.values.lease_record import folder_of

if TYPE_CHECKING:
    import optuna

#: Names of what Optuna keeps for us: with a trial, and with the study.
RUN_ID, ERROR = "distributor.run_id", "distributor.error"
ID, METRIC, TARGET, PARAMETERS = "distributor.id", "distributor.metric", "distributor.target", "distributor.parameters"

_JOURNAL = "study.journal"

Metric = tuple[str, Literal["min", "max"]]


@dataclass(frozen=True)
class Kept:
    """A study's name and where it is kept: in the user's storage, or in a folder, or only in memory."""

    name: str
    folder: str | None
    given: optuna.storages.BaseStorage | None = None
    resumes: bool = True  # the next driver of its name goes on with it

    @classmethod
    def of(
        cls, checkpoints: Checkpoints | None, name: str | None, storage: optuna.storages.BaseStorage | None = None
    ) -> Kept:
        """Choose the place of a study; without a name, make up a new one."""
        if name is None:
            return cls(f"sweep-{secrets.token_hex(3)}", None, storage, resumes=False)
        if storage is not None:
            return cls(name, None, storage)
        if checkpoints is not None and not is_url(checkpoints.dir):
            return cls(name, folder_of(absolute(checkpoints).dir, name))
        folder = folder_of(str(default_folder()), name)
        notices.inform(f"the study {name!r} is kept in {folder}, for this machine only")
        return cls(name, folder)

    def study(
        self,
        metric: Metric,
        sampler: optuna.samplers.BaseSampler | None = None,
        pruner: optuna.pruners.BasePruner | None = None,
    ) -> optuna.Study:
        """Return Optuna's study, as an earlier driver has left it or new."""
        import optuna

        return optuna.create_study(
            study_name=self.name,
            direction="minimize" if metric[1] == "min" else "maximize",
            sampler=sampler,
            pruner=pruner,
            storage=self._storage(),
            load_if_exists=True,
        )

    def _storage(self) -> optuna.storages.BaseStorage | None:
        from optuna.storages import JournalStorage, journal

        if self.folder is None:
            return self.given
        os.makedirs(self.folder, exist_ok=True)
        return JournalStorage(journal.JournalFileBackend(os.path.join(self.folder, _JOURNAL)))

    @contextmanager
    def held(self, job: Job, metric: Metric) -> Iterator[list[str]]:
        """Let no other driver have the study. The list gets a sentence if one takes it all the same.

        The lease is where the study is, so that each driver that sees the study sees the lease.
        """
        lost: list[str] = []
        where = self.folder
        if where is None and self.given is not None:
            where = f"storage://{self.name}"  # only shown
        if where is None:
            yield lost
            return
        storage = open_storage(where, job.run_id) if self.given is None else _InStudy(self.study(metric))
        holder = replace(job, name=self.name, identity=None, checkpoints=Checkpoints(where))
        with lease.hold(holder, lambda: True, lost.append, storage=storage, thing=f"the study {self.name!r}"):
            if self.folder is not None:
                _mend(os.path.join(self.folder, _JOURNAL))
            yield lost


def _mend(journal: str) -> None:
    """Remove what a driver that was killed has left: Optuna's lock, and a line that is not complete."""
    with suppress(FileNotFoundError):
        os.unlink(f"{journal}.lock")
    with suppress(FileNotFoundError), open(journal, "r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


class _InStudy:
    """Keeps a lease in the attributes of a study: the two methods of :class:`Storage` that a lease needs."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def read(self, name: str) -> bytes | None:
        with _as_os_error():
            text = self._study.user_attrs.get(f"distributor.{name}")
        return None if text is None else text.encode("latin-1")

    def write(self, name: str, data: bytes) -> None:
        with _as_os_error():
            self._study.set_user_attr(f"distributor.{name}", data.decode("latin-1"))


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn the errors of a storage, which may be a database's, into those that a lease expects."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def trial_folder(place: str, study: str, number: int, params: Mapping[str, Any]) -> str:
    """Return the folder or URL for the checkpoints or the files of one trial."""
    digest = hashlib.sha256(repr(sorted(params.items())).encode()).hexdigest()[:8]
    return f"{folder_of(place, study)}/{number}-{digest}"


def is_begun(trial: optuna.trial.FrozenTrial) -> bool:
    """Whether a trial counts: it neither waits in a user's queue nor was refused before it had a run."""
    return trial.state.name != "WAITING" and not (trial.state.name == "FAIL" and RUN_ID not in trial.user_attrs)


def of_optuna(trial: optuna.trial.FrozenTrial) -> Trial:
    """Return the record of a trial that ended under an earlier driver."""
    outcome = {"COMPLETE": "complete", "PRUNED": "pruned"}.get(trial.state.name, "failed")
    error = trial.user_attrs.get(ERROR)
    return Trial(
        trial.number,
        trial.params,
        outcome,  # type: ignore[arg-type]
        trial.value,
        0.0 if trial.duration is None else trial.duration.total_seconds(),
        None if error is None else TrainingError(error),
        trial.user_attrs.get(RUN_ID, ""),
    )
