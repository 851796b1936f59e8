"""Notes what was run, for the table of ``docs/frameworks.md``: ``FRAMEWORKS_OUT=FILE`` writes it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
from sessions import LOCAL

#: What a test of a framework tells of itself: system, distribution, row, where it runs.
_PROPERTY = "framework"


@pytest.fixture
def spread(mode: str) -> dict[str, Any]:
    """Options for one rank on each executor, where there are executors."""
    return {} if mode == LOCAL else {"max_processes_per_node": 1}


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("ci") is None:
        item.add_marker("long")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("framework")
        if mark is None:
            continue
        system, distribution, *row = mark.args
        params = getattr(item, "callspec", None)
        mode = None if params is None else params.params.get("mode")
        where = mark.kwargs.get("where") or ("local" if mode in (None, LOCAL) else "executors")
        name = row[0] if row else str(item.name).partition("[")[0].removeprefix("test_").replace("_", " ")
        item.user_properties.append((_PROPERTY, [system, distribution, name, where]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    path = os.environ.get("FRAMEWORKS_OUT")
    if path is None:
        return
    rows: dict[str, dict[str, Any]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            noted = dict(getattr(report, "user_properties", ())).get(_PROPERTY)
            if noted is None or (outcome == "passed" and report.when != "call"):
                continue
            system, distribution, name, where = noted
            row = rows.setdefault(f"{system}: {name}", {"system": system, "row": name})
            row["version"] = f"{distribution} {importlib.metadata.version(distribution)}"
            row["python"] = platform.python_version()
            row[where] = "failed" if outcome != "passed" or row.get(where) == "failed" else "passed"
    known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
    Path(path).write_text(json.dumps({**known, **rows}, indent=1, sort_keys=True) + "\n")
