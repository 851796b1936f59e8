"""Shows users the metrics that ranks have reported: as rows, as latest values, and as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from distributor.errors import ConfigurationError
from distributor.metrics import plot
from distributor.metrics.goodput import Goodput
from distributor.text.wording import count

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from matplotlib.figure import Figure


class Row(NamedTuple):
    """One report of a rank.

    Attributes:
        attempt: the attempt in which the report was made, from 0.
        step: the step that the rank reported; ``None`` if it reported no step.
        time: when the report was made, in seconds since the epoch, by the clock of the rank's host.
        rank: the rank that made the report.
        values: the reported values, by name.
    """

    attempt: int
    step: int | None
    time: float
    rank: int
    values: Mapping[str, float]


class TrackedRow(Row):
    """A row whose values the rank has logged to the run in MLflow as well."""

    __slots__ = ()


@dataclass(frozen=True, repr=False)
class Metrics(Sequence[Row]):
    """All reports of a run's ranks up to one moment: a sequence of rows, in order of attempt and time.

    Attributes:
        rows: one row for each report.
        dropped: number of reports that ``rows`` lacks, because a rank reported too much to keep each of its reports, or
            because a disk was full.

    Example:
        >>> metrics = Metrics((Row(0, 1, 10.0, 0, {"loss": 0.5}), Row(0, 2, 11.0, 0, {"loss": 0.25})))
        >>> [(row.step, row.values["loss"]) for row in metrics]
        [(1, 0.5), (2, 0.25)]
        >>> metrics.latest
        {'loss': 0.25}
    """

    rows: tuple[Row, ...] = ()
    dropped: int = 0

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return f"<Metrics: {count(len(self.rows), 'row')}, {', '.join(self.names) or 'no values'}>"

    @property
    def names(self) -> list[str]:
        """The names of all reported values, in the order in which they were first reported."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of each metric, by name: the lowest rank's value if several ranks report the metric."""
        found: dict[str, tuple[int, float]] = {}
        for row in self.rows:
            for name, value in row.values.items():
                if name not in found or row.rank <= found[name][0]:
                    found[name] = (row.rank, value)
        return {name: value for name, (_, value) in found.items()}

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with a row for each report. The columns are attempt, step, time, rank, and each metric.

        Missing values of metrics are NaN, and missing steps ``pandas.NA``. A metric with the name of another column,
        such as ``time``, is in the column ``value.time``.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise _missing("to_pandas()", "pandas") from None
        columns = self._columns()
        return pandas.DataFrame({**columns, "step": pandas.array(columns["step"], "Int64")})

    def to_arrow(self) -> pyarrow.Table:
        """Return an Arrow table with the columns of :meth:`to_pandas`. Missing values are null.

        Raises:
            ConfigurationError: pyarrow is not installed.
        """
        try:
            import pyarrow
        except ImportError:
            raise _missing("to_arrow()", "pyarrow") from None
        types = {"attempt": pyarrow.int64(), "step": pyarrow.int64(), "rank": pyarrow.int64()}
        return pyarrow.table(
            {
                name: pyarrow.array(values, types.get(name, pyarrow.float64()))
                for name, values in self._columns().items()
            }
        )

    def _columns(self) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in self.rows] for name in Row._fields[:-1]}
        names = self.names
        for name in names:
            column = name
            while column in Row._fields or (column != name and column in names):
                column = f"value.{column}"
            columns[column] = [None if (value := row.values.get(name)) is None else float(value) for row in self.rows]
        return columns

    def plot(self) -> Figure:
        """Return a figure with a plot of each metric, by step, or by time if any of the metric's reports has no step.

        A line shows the lowest rank that reports the metric, and a band the range over all ranks. Of more than 60
        metrics, the figure has the first 60. A notebook displays the figure as the value of a cell.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        return figure_of(self)


def figure_of(metrics: Metrics, goodput: Goodput | None = None) -> Figure:
    """Return the figure of :meth:`Metrics.plot`, with a bar of how the time was spent; see there."""
    try:
        return plot.draw(metrics, goodput)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise _missing("plot()", "matplotlib") from None


def _missing(what: str, package: str) -> ConfigurationError:
    return ConfigurationError(f"{what} needs {package}, which is not installed: pip install {package}")
