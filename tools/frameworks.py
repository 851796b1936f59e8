"""Write the table of ``docs/frameworks.md`` from the results that ``make test-frameworks`` has recorded."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "frameworks"
NOTED, PAGE = ROOT / "benchmarks" / "frameworks.json", ROOT / "docs" / "frameworks.md"

#: Where a test may have run: the columns.
PLACES = ("local", "executors", "GPU")


def declared() -> dict[str, dict[str, Any]]:
    """Return the rows that tests declare with the mark ``framework``, by their names in the file of results.

    The tests are read and not imported, because they need several environments. So the words of a mark must be
    literals, or a tuple of literals that its module names.

    Raises:
        ValueError, KeyError: the words of a mark are something else.
    """
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for system, distribution, name, only in _marks(ast.parse(path.read_text())):
            row = {"system": system, "row": name, "version": distribution, "only": set()}
            rows.setdefault(f"{system}: {name}", row)["only"].add(only)
    return rows


def _marks(module: ast.Module) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield the system, distribution, row and only place that each mark of a module of tests says."""
    tests = [node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    named = {ast.unparse(node.targets[0]): node.value for node in module.body if isinstance(node, ast.Assign)}
    for node in module.body:
        for call in ast.walk(node):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.framework"):
                continue
            words: list[str] = []
            for word in call.args:
                starred = isinstance(word, ast.Starred)
                words += ast.literal_eval(named[ast.unparse(word.value)]) if starred else [ast.literal_eval(word)]
            only = next((ast.literal_eval(each.value) for each in call.keywords if each.arg == "where"), None)
            own = [node.name] if isinstance(node, ast.FunctionDef) else tests
            for name in words[2:] or [test.removeprefix("test_").replace("_", " ") for test in own]:
                yield words[0], words[1], name, only


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table: one line per framework.

    >>> dpo = {"system": "TRL", "row": "DPO", "version": "trl 1.16.0", "python": "3.11.7", "local": "passed"}
    >>> print(table({"a": dpo, "b": {**dpo, "row": "GRPO", "executors": "failed"},
    ...              "c": {"system": "TRL", "row": "FSDP", "version": "trl"}}))
    | framework | tested version, Python 3.11.7 | what was shown | local | executors | GPU |
    |---|---|---|---|---|---|
    | TRL | trl 1.16.0 | DPO (local); FSDP (not run); GRPO | passed | failed: GRPO | not run |
    """
    systems: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows.values(), key=lambda row: (row["system"].lower(), row["row"])):
        systems.setdefault(row["system"], []).append(row)
    pythons = ", ".join(sorted({row["python"] for row in rows.values() if "python" in row}))
    lines = [
        " | ".join(["framework", f"tested version, Python {pythons}", "what was shown", *PLACES]),
        "---|---|---" + "|---" * len(PLACES),
        *(_line(system, of_system) for system, of_system in systems.items()),
    ]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


def _line(system: str, rows: list[Mapping[str, Any]]) -> str:
    """The cells of one framework; a test names its places if it did not run in all where the framework ran."""
    used = [place for place in PLACES if any(place in row for row in rows)]
    versions = sorted({row["version"] for row in rows if "python" in row}) or [rows[0]["version"]]
    shown = []
    for row in rows:
        places = [place for place in used if place in row]
        shown.append(row["row"] + (f" ({', '.join(places) or 'not run'})" if not places or places != used else ""))
    results = []
    for place in PLACES:
        failed = [row["row"] for row in rows if row.get(place) == "failed"]
        results.append(f"failed: {', '.join(failed)}" if failed else "passed" if place in used else "not run")
    return " | ".join([system, ", ".join(versions), "; ".join(shown), *results])


def page(text: str, noted: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with its table replaced: rows that tests declare, and rows that were noted, with results."""
    rows = {**declared(), **noted}
    return re.sub(r"(?s)(?<=<!-- table -->\n\n).*?(?=\n\n<!-- end -->)", lambda _: table(rows), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), json.loads(NOTED.read_text())))
