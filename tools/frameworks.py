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
NOTED, PAGE = ROOT / "docs" / "frameworks.json", ROOT / "docs" / "frameworks.md"

#: Where a test may have run, and the name of its column.
PLACES = {"local": "local", "executors": "executors", "GPU": "GPU"}


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
    """Return the table.

    >>> print(table({"a": {"system": "TRL", "row": "DPO", "version": "trl 1.16.0", "python": "3.11.7",
    ...                    "local": "passed"}, "b": {"system": "TRL", "row": "FSDP", "version": "trl"}}))
    | system | tested version | what | local | executors | GPU |
    |---|---|---|---|---|---|
    | TRL | trl 1.16.0, Python 3.11.7 | DPO | passed | not run | not run |
    | TRL | trl | FSDP | not run | not run | not run |
    """
    lines = ["system | tested version | what | " + " | ".join(PLACES.values()), "---|---|---" + "|---" * len(PLACES)]
    for about in sorted(rows.values(), key=lambda about: (about["system"].lower(), about["row"])):
        ran = [about.get(place, "not run") for place in PLACES]
        version = f"{about['version']}, Python {about['python']}" if "python" in about else about["version"]
        lines.append(" | ".join([about["system"], version, about["row"], *ran]))
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


def page(text: str, noted: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with its table replaced: rows that tests declare, and rows that were noted, with results."""
    rows = {**declared(), **noted}
    return re.sub(r"(?s)(?<=<!-- table -->\n\n).*?(?=\n\n<!-- end -->)", lambda _: table(rows), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), json.loads(NOTED.read_text())))
