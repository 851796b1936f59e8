"""What Optuna is told of a trial's reports."""

import math
from types import SimpleNamespace

from distributor.metrics.table import Row
from distributor.search.sweep import _Search


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
