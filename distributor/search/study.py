"""What a search has found: its trials, the best of them, a table and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from distributor.errors import ConfigurationError
from distributor.metrics.plot import shown
from distributor.text.tables import table
from distributor.text.wording import count, duration

if TYPE_CHECKING:
    import optuna
    from matplotlib.figure import Figure

Outcome = Literal["complete", "pruned", "failed", "cancelled"]


@dataclass(frozen=True)
class Trial:
    """One trial that has ended.

    Attributes:
        number: counts trials from 0, in the order in which they began.
        params: the parameters that the function got.
        outcome: ``"complete"``, ``"pruned"``, ``"failed"`` or ``"cancelled"``.
        value: the last reported value of the metric; ``None`` if there is none.
        seconds: how long its run took.
        error: why it failed.
        run_id: the ``id`` of its run.
    """

    number: int
    params: Mapping[str, Any]
    outcome: Outcome
    value: float | None
    seconds: float
    error: Exception | None
    run_id: str


class Trials(tuple[Trial, ...]):
    """Trials in the order of their numbers. ``print`` shows them as a table."""

    def __repr__(self) -> str:
        names = list(dict.fromkeys(name for trial in self for name in trial.params))
        rows = [
            [
                str(trial.number),
                trial.outcome,
                "" if trial.value is None else f"{trial.value:.6g}",
                *(_shown(trial.params.get(name)) for name in names),
                duration(trial.seconds),
            ]
            for trial in self
        ]
        return table(["trial", "outcome", "value", *names, "time"], rows)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(repr(self))}</pre>"


class Study:
    """What :func:`sweep` returns.

    Attributes:
        name: the study's name.
        id: identifies the study. It stays the same if another driver goes on with it.
        metric: the name of the metric, and ``"min"`` or ``"max"``.
        interrupted: whether Ctrl-C ended the search, or the wait for callbacks after it.
        error: what has ended the search early and is raised, for callbacks; ``None`` otherwise.
        optuna: Optuna's study, for its own analyses. It is read only while the search runs.
    """

    def __init__(self, name: str, metric: tuple[str, Literal["min", "max"]], optuna: optuna.Study, id: str) -> None:
        self.name = name
        self.id = id
        self.metric = metric
        self.optuna = optuna
        self.interrupted = False
        self.error: BaseException | None = None
        self._trials: dict[int, Trial] = {}

    def __repr__(self) -> str:
        best = self.best
        found = (
            "no complete trial" if best is None else f"best {self.metric[0]} {best.value:.6g} of trial {best.number}"
        )
        return f"<Study {self.name}: {count(len(self._trials), 'trial')}, {found}>"

    def add(self, trial: Trial) -> None:
        """Record a trial that has ended."""
        self._trials[trial.number] = trial

    @property
    def table(self) -> Trials:
        """All trials that have ended."""
        return Trials(trial for _, trial in sorted(self._trials.items()))

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best value, of several the first; ``None`` without one."""
        return min((each for each in self.table if each.outcome == "complete"), key=self._badness, default=None)

    def _badness(self, trial: Trial) -> float:
        assert trial.value is not None
        return trial.value if self.metric[1] == "min" else -trial.value

    def plot(self) -> Figure:
        """Return a figure of the values of complete trials, and of the best value so far.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise ConfigurationError(
                "plot() needs matplotlib, which is not installed: pip install matplotlib"
            ) from None
        complete = [trial for trial in self.table if trial.outcome == "complete"]
        best = [min(complete[: count + 1], key=self._badness).value for count in range(len(complete))]
        numbers = [trial.number for trial in complete]
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        plot = figure.add_subplot()
        plot.plot(numbers, [trial.value for trial in complete], "o", label="trial")
        plot.step(numbers, best, where="post", label="best so far")
        plot.set_xlabel("trial")
        plot.set_ylabel(self.metric[0], parse_math=False)
        plot.legend()
        return shown(figure)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
