"""What differs between Spark's versions, from 3.5 on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def why_no_profiles(version: str, master: str, *, connect: bool) -> str | None:
    """Return why stages cannot have their own numbers of CPUs and GPUs; ``None`` if they can."""
    spark = _numbers(version)
    if connect and spark < (4,):
        return "stage-level scheduling on Spark Connect needs Spark 4.0 or later"
    if master.startswith(("spark://", "local-cluster")):
        return None
    if master.startswith(("yarn", "k8s://")):
        return None if spark >= (3, 5, 1) else f"stage-level scheduling with master {master} needs Spark 3.5.1 or later"
    return f"Spark has no stage-level scheduling with master {master}"


def why_no_frame_profiles(version: str) -> str | None:
    """Return why stages of a DataFrame cannot have their own; ``None`` if they can."""
    if _numbers(version) >= (4,):
        return None
    return f"stages of DataFrames cannot ask for others before Spark 4.0 (this is {version})"


def session_tags(session: SparkSession) -> list[str]:
    """Return the tag by which ``spark.interruptAll()`` finds a session's jobs. Spark 3.5 has none."""
    try:
        return [str(cast(Any, session)._jsparkSession.sessionJobTag())]
    except Exception:
        return []


def cancel_jobs(context: Any, tag: str, reason: str) -> None:
    """Cancel the jobs of a tag in Scala's SparkContext. Spark 3.5 shows no reason."""
    try:
        context.cancelJobsWithTag(tag, reason)
    except Exception:
        context.cancelJobsWithTag(tag)


@contextmanager
def progress_to(session: Any, handler: Any) -> Iterator[None]:
    """Let a Connect session call a handler with the progress of queries. Spark 3.5 tells none."""
    if not hasattr(session, "registerProgressHandler"):
        yield
        return
    session.registerProgressHandler(handler)
    try:
        yield
    finally:
        with suppress(Exception):  # the user may have cleared all handlers
            session.removeProgressHandler(handler)


def binary_values(frame: Any, column: str) -> list[bytes]:
    """Collect a frame's only column, of binary values; without a Row each from Spark 4.0 on."""
    if hasattr(frame, "toArrow"):
        return [value.as_buffer().to_pybytes() for value in frame.toArrow().column(column)]
    return [bytes(row[0]) for row in frame.collect()]
