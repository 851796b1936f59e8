"""Shows a search while it goes on: a table of its trials, or a line for each that has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping

from distributor.display.trials import TrialRow, TrialsSnapshot, TrialsView
from distributor.run.handle import Run
from distributor.search.study import Study, Trial
from distributor.text import notices


class Live:
    """Shows a search in a view; without one, nothing."""

    def __init__(self, study: Study, wanted: float, view: TrialsView | None) -> None:
        self._study = study
        self._wanted = wanted
        self._view = view
        self._steps: dict[int, int | None] = {}  # of trials that have ended
        self._begun = time.monotonic()
        self._due = 0.0

    def look(self, active: Mapping[int, tuple[Run, Mapping[str, object]]]) -> None:
        """Show the search with the runs and parameters of its ``active`` trials, unless that has just been done."""
        if self._view is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._view.interval
            self._view.show(self._snapshot(active))

    def ended(self, trial: Trial, run: Run) -> None:
        """Take note of the end of a trial, which the study has."""
        self._due = 0.0
        self._steps[trial.number] = None if run.progress is None else run.progress.step
        if self._view is None or not (self._view.announces or trial.outcome == "failed"):
            return
        best = self._study.best
        said = "" if trial.value is None else f", {self._study.metric[0]} {trial.value:.6g}"
        far = "" if best is None else f"; best {best.value:.6g} of trial {best.number}"
        why = "" if trial.error is None else f": {str(trial.error).partition(chr(10))[0]}"
        notices.inform(
            f"{self._study.name}: trial {trial.number} {trial.outcome}{why}{said}{far} "
            f"({len(self._study.table)} of {self._wanted:g})"
        )

    def close(self) -> None:
        if self._view is not None:
            self._view.close(self._snapshot({}))

    def _snapshot(self, active: Mapping[int, tuple[Run, Mapping[str, object]]]) -> TrialsSnapshot:
        best, name = self._study.best, self._study.metric[0]
        ended = [
            TrialRow(each.number, each.outcome, each.params, self._steps.get(each.number), each.value)
            for each in self._study.table
        ]
        live = [
            TrialRow(
                number,
                run.status.value,
                params,
                None if run.progress is None else run.progress.step,
                run.latest_metrics.get(name),
                is_live=True,
            )
            for number, (run, params) in active.items()
        ]
        return TrialsSnapshot(
            self._study.name,
            name,
            self._wanted,
            time.monotonic() - self._begun,
            tuple(sorted(ended + live, key=lambda row: row.number)),
            None if best is None else best.number,
        )
