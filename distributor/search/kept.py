"""Where a study is kept, and which driver has it: the next driver of its name goes on with it."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distributor.errors import TrainingError
from distributor.machine.storage import is_url
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
METRIC, ID = "distributor.metric", "distributor.id"

_JOURNAL = "study.journal"


@dataclass(frozen=True)
class Kept:
    """A study's name and, if it is kept, its folder."""

    name: str
    folder: str | None

    @classmethod
    def of(cls, checkpoints: Checkpoints | None, name: str | None) -> Kept:
        """Choose the folder of a study; without a name, make up a new one."""
        if name is None:
            return cls(f"sweep-{secrets.token_hex(3)}", None)
        if checkpoints is not None and not is_url(checkpoints.dir):
            return cls(name, folder_of(absolute(checkpoints).dir, name))
        folder = folder_of(str(default_folder()), name)
        notices.inform(f"the study {name!r} is kept in {folder}, for this machine only")
        return cls(name, folder)

    @property
    def is_named(self) -> bool:
        """Whether the user has named the study."""
        return self.folder is not None

    def storage(self) -> optuna.storages.BaseStorage | None:
        """Return Optuna's storage in the folder; ``None`` keeps the study in memory."""
        from optuna.storages import JournalStorage, journal

        if self.folder is None:
            return None
        os.makedirs(self.folder, exist_ok=True)
        return JournalStorage(journal.JournalFileBackend(os.path.join(self.folder, _JOURNAL)))

    @contextmanager
    def held(self, job: Job) -> Iterator[list[str]]:
        """Let no other driver have the study. The list gets a sentence if one takes it all the same."""
        lost: list[str] = []
        if self.folder is None:
            yield lost
            return
        os.makedirs(self.folder, exist_ok=True)
        holder = replace(job, name=self.name, identity=None, checkpoints=Checkpoints(self.folder))
        with lease.hold(holder, lambda: True, lost.append):
            yield lost


def trial_folder(place: str, study: str, number: int, params: Mapping[str, Any]) -> str:
    """Return the folder or URL for the checkpoints of one trial."""
    digest = hashlib.sha256(repr(sorted(params.items())).encode()).hexdigest()[:8]
    return f"{folder_of(place, study)}/{number}-{digest}"


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
