"""What a Connect server's progress says about a run's query."""

from __future__ import annotations

from types import SimpleNamespace

from distributor.schedulers.spark.progress import StageProgress


def test_progress_tells_whether_tasks_have_started() -> None:
    progress = StageProgress(2)
    stage, other = SimpleNamespace(num_tasks=2), SimpleNamespace(num_tasks=3)
    progress([other], 3, "q", False)
    assert not progress.waiting
    progress([stage], 0, "q", False)
    assert progress.waiting
    progress([stage], 1, "q", False)
    progress([stage], 0, "q", False)
    assert not progress.waiting
