"""Spark's own settings that end or starve a long task: a table with one row for the settings that do harm together."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Read = Callable[[str], str | None]  # the value of a setting, if it is set

#: Settings that a session of Spark Connect may set for itself, by the names of the server's settings.
_OF_SESSION = {
    "spark.python.worker.killOnIdleTimeout": "spark.sql.execution.pyspark.udf.killOnIdleTimeout",
    "spark.python.worker.idleTimeoutSeconds": "spark.sql.execution.pyspark.udf.idleTimeoutSeconds",
}

#: Spark's units of time, in seconds. Source:
#: https://github.com/apache/spark/blob/v4.0.0/common/utils/src/main/java/org/apache/spark/network/util/JavaUtils.java
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


_DETACHED_TIMEOUT = "spark.connect.execute.manager.detachedTimeout"
_SESSION_TIMEOUT = "spark.connect.session.manager.defaultSessionTimeout"


class Where(enum.Enum):
    """The sessions in which settings do harm."""

    ALL = enum.auto()
    EXECUTORS = enum.auto()  # all but local[...] masters
    CONNECT = enum.auto()


class Answer(enum.Enum):
    """What to do before a run starts."""

    REFUSE = enum.auto()
    WARN = enum.auto()
    NOTHING = enum.auto()  # the settings are in order, but may explain the loss of a task


@dataclass(frozen=True)
class Hazard:
    """Settings that do harm together."""

    settings: tuple[str, ...]
    harms: Callable[..., bool]  # of the settings' values, None for one that is not set
    effect: str  # what Spark does then
    remedy: str  # with {0} for the first setting
    answer: Answer = Answer.REFUSE
    where: Where = Where.ALL
    since: tuple[int, int] = (3, 5)  # the first version of Spark that has the settings
    said: str | None = None  # matches what Spark says of a task whose loss they explain


def is_true(setting: Any) -> bool:
    """Return whether Spark interprets a setting's value as true."""
    return str(setting).strip().lower() == "true"


def seconds(value: str | None, unit: str, unset: float) -> float:
    """Return the number of seconds that a setting says, or ``unset`` if it is not set or is no time.

    >>> seconds("5m", "s", 0.0), seconds("1000", "ms", 0.0), seconds(None, "s", 7.0)
    (300.0, 1.0, 7.0)
    """
    match = re.fullmatch(r"(-?\d+)\s*([a-z]*)", (value or "").strip().lower())
    if match is None or (match[2] or unit) not in _UNITS:
        return unset
    return int(match[1]) * _UNITS[match[2] or unit]


def _closes_session(timeout: str | None, interval: str | None, stream: str | None) -> bool:
    """Return whether a client that waits for a query calls too rarely for its session to stay open.

    It calls the server after each report of progress, and when the server ends a stream of responses.
    """
    limit, progress, longest = (
        seconds(timeout, "ms", 3600.0),
        seconds(interval, "ms", 2.0),
        seconds(stream, "ms", 120.0),
    )
    calls = [gap for gap in (progress, longest) if gap > 0]
    return limit >= 0 and min(calls, default=float("inf")) >= limit


HAZARDS = (
    Hazard(
        ("spark.dynamicAllocation.enabled",),
        is_true,
        "Spark's barrier mode supports it only on local[...] masters (SPARK-24942)",
        "Set it to false, and spark.executor.instances to the number of executors to train on",
        where=Where.EXECUTORS,
    ),
    Hazard(
        ("spark.python.worker.killOnIdleTimeout", "spark.python.worker.idleTimeoutSeconds"),
        lambda kill, idle: is_true(kill) and seconds(idle, "s", 0.0) >= 1,
        "Spark kills the Python worker of a task, and with it the ranks, if the worker sends nothing for that long, as "
        "while ranks train",
        "Set {0} to false",
        since=(4, 1),
    ),
    Hazard(
        (
            _SESSION_TIMEOUT,
            "spark.connect.progress.reportInterval",
            "spark.connect.execute.reattachable.senderMaxStreamDuration",
        ),
        _closes_session,
        "Spark closes a session that makes no call for that long, and a client makes too few while it waits for a run",
        "Raise {0} on the server",
        where=Where.CONNECT,
        since=(4, 0),
    ),
    Hazard(
        (
            "spark.excludeOnFailure.killExcludedExecutors",
            "spark.excludeOnFailure.enabled",
            "spark.excludeOnFailure.application.enabled",
        ),
        lambda kill, *enabled: is_true(kill) and any(map(is_true, enabled)),
        "Spark ends an executor, with the ranks on it, once tasks of other jobs have failed there",
        "Set {0} to false, or run the other jobs in another application",
        answer=Answer.WARN,
        where=Where.EXECUTORS,
        said="killed by driver",
    ),
    Hazard(
        ("spark.driver.timeout", "spark.plugins"),
        lambda limit, plugins: seconds(limit, "min", 0.0) > 0 and "DriverTimeoutPlugin" in (plugins or ""),
        "Spark ends the driver, and with it every run, that long after the driver's start",
        "Raise {0}, or leave out the plugin, if runs take longer",
        answer=Answer.WARN,
        since=(4, 0),
    ),
    Hazard(
        ("spark.executor.decommission.forceKillTimeout",),
        bool,
        "Spark ends an executor, with the ranks on it, that long after it began to decommission the executor",
        "Raise {0}, or let ranks stop in time (runtime.should_stop)",
        answer=Answer.NOTHING,
        where=Where.EXECUTORS,
        said="killed by driver",
    ),
    Hazard(
        ("spark.task.reaper.enabled", "spark.task.reaper.killTimeout"),
        lambda enabled, limit: is_true(enabled) and seconds(limit, "ms", -1.0) >= 0,
        "Spark ends an executor, with the ranks on it, if a cancelled task of any job does not end there within that "
        "time",
        "Raise spark.task.reaper.killTimeout, or set {0} to false",
        answer=Answer.NOTHING,
        where=Where.EXECUTORS,
        said=r"exited with code 5[07]\b",  # 57 in Spark 4; in Spark 3.5 50, as for any uncaught exception
    ),
    Hazard(
        ("spark.barrier.sync.timeout",),
        bool,
        "Spark ends the exchange of the tasks' addresses if not all tasks begin it within that time",
        "Raise {0}",
        answer=Answer.NOTHING,
        said=r"in allGather\n.*\bEOFError\b",
    ),
    Hazard(
        (_SESSION_TIMEOUT,),
        lambda _: True,
        f"Spark closes a session that makes no call for {_SESSION_TIMEOUT} (an hour by default), for example while "
        "this machine sleeps",
        "Raise {0} on the server",
        answer=Answer.NOTHING,
        where=Where.CONNECT,
        said="SESSION_CLOSED",
    ),
    Hazard(
        (_DETACHED_TIMEOUT,),
        lambda _: True,
        f"Spark ends a query whose client does not fetch responses for {_DETACHED_TIMEOUT} (5 minutes by default), for "
        "example while this machine sleeps",
        "Raise {0} on the server",
        answer=Answer.NOTHING,
        where=Where.CONNECT,
        said="OPERATION_ABANDONED",
    ),
)


@dataclass(frozen=True)
class Found:
    """A hazard of a session, and the sentences that explain it."""

    hazard: Hazard
    text: str


def find(version: str, wheres: Sequence[Where], read: Read, table: Sequence[Hazard] = HAZARDS) -> list[Found]:
    """Return the hazards of a session of this version of Spark and these kinds."""
    running = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    remote = Where.CONNECT in wheres
    rows = [hazard for hazard in table if hazard.where in wheres and running >= hazard.since]
    given = [(row, [_in_force(name, read, remote) for name in row.settings]) for row in rows]
    return [Found(row, _text(row, pairs, remote)) for row, pairs in given if row.harms(*(value for _, value in pairs))]


def explain(hazards: Sequence[Found], reason: str) -> str:
    """Return the sentences on the settings that explain what Spark says of a lost task; ``""`` if none does."""
    return ". ".join(
        found.text for found in hazards if found.hazard.said and re.search(found.hazard.said, reason, re.DOTALL)
    )


def _in_force(name: str, read: Read, remote: bool) -> tuple[str, str | None]:
    """Return name and value of a setting, or of the session's own setting that replaces it."""
    of_session = _OF_SESSION.get(name) if remote else None
    if of_session is not None and (value := read(of_session)) is not None:
        return of_session, value
    return name, read(name)


def _text(hazard: Hazard, values: Sequence[tuple[str, str | None]], remote: bool) -> str:
    given = " and ".join(f"{name} is {value.strip()}" for name, value in values if value is not None)
    first = hazard.settings[0]
    remedy = hazard.remedy.format(_OF_SESSION.get(first, first) if remote else first)
    return f"{given}: {hazard.effect}. {remedy}" if given else f"{hazard.effect}. {remedy}"
