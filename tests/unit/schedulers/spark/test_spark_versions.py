"""What differs between Spark's versions. ``make test-spark`` runs whole trainings on each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distributor.schedulers.spark import spark_versions
from distributor.schedulers.spark.spark_versions import why_no_frame_profiles, why_no_profiles


@pytest.mark.parametrize(
    ("version", "master", "connect", "words"),
    [
        ("3.5.0", "spark://host:7077", False, None),
        ("3.5.0", "local-cluster[2,2,1024]", False, None),
        ("3.5.0", "yarn", False, "master yarn needs Spark 3.5.1 or later"),
        ("3.5.1", "k8s://host", False, None),
        ("3.5.9", "spark://host:7077", True, "Connect needs Spark 4.0 or later"),
        ("4.0.0.dev1", "spark://host:7077", True, None),
        ("4.3.0", "local[4]", False, r"no stage-level scheduling with master local[4]"),
    ],
)
def test_whether_stages_can_ask_for_resources(version: str, master: str, connect: bool, words: str | None) -> None:
    reason = why_no_profiles(version, master, connect=connect)
    assert reason is None if words is None else words in str(reason)


def test_whether_stages_of_frames_can() -> None:
    assert why_no_frame_profiles("4.0.1") is None
    assert "before Spark 4.0 (this is 3.5.9)" in str(why_no_frame_profiles("3.5.9"))


class _Context:
    def __init__(self, parameters: int) -> None:
        self.parameters, self.calls = parameters, []  # type: ignore[var-annotated]

    def cancelJobsWithTag(self, *arguments: str) -> None:
        if len(arguments) != self.parameters:
            raise TypeError("no such method")
        self.calls.append(arguments)


def test_jobs_are_cancelled_with_a_reason_where_spark_takes_one() -> None:
    old, new = _Context(1), _Context(2)
    for context in (old, new):
        spark_versions.cancel_jobs(context, "tag", "rank 1 failed")
    assert (old.calls, new.calls) == ([("tag",)], [("tag", "rank 1 failed")])


def test_a_session_without_a_tag_or_progress_works() -> None:
    session: Any = SimpleNamespace(_jsparkSession=SimpleNamespace())
    assert spark_versions.session_tags(session) == []
    with spark_versions.progress_to(session, print):
        pass
    frame = SimpleNamespace(collect=lambda: [(bytearray(b"a"),), (bytearray(b"b"),)])
    assert spark_versions.binary_values(frame, "piece") == [b"a", b"b"]
