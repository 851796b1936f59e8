"""Write the table of ``docs/frameworks.md`` from the results that ``make test-frameworks`` has recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTED, PAGE = DOCS / "frameworks.json", DOCS / "frameworks.md"

#: Where a test may have run, and the name of its column.
PLACES = {"local": "local", "executors": "executors", "GPU": "GPU"}


def table(noted: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table.

    >>> print(table({"a": {"system": "TRL", "row": "DPO", "version": "trl 1.16.0", "python": "3.11.7",
    ...                    "local": "passed"}}))
    | system | version | what | local | executors | GPU |
    |---|---|---|---|---|---|
    | TRL | trl 1.16.0, Python 3.11.7 | DPO | passed | not run | not run |
    """
    lines = ["system | version | what | " + " | ".join(PLACES.values()), "---|---|---" + "|---" * len(PLACES)]
    for about in sorted(noted.values(), key=lambda about: (about["system"].lower(), about["row"])):
        ran = [about.get(place, "not run") for place in PLACES]
        version = f"{about['version']}, Python {about['python']}"
        lines.append(" | ".join([about["system"], version, about["row"], *ran]))
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


def page(text: str, noted: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with its table replaced."""
    return re.sub(r"(?s)(?<=<!-- table -->\n\n).*?(?=\n\n<!-- end -->)", lambda _: table(noted), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), json.loads(NOTED.read_text())))
