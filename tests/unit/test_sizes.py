"""Classes, functions and modules that one can hold in mind: sizes without docstrings, comments and blank lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import distributor

ROOT = Path(distributor.__file__).parent
DOCS = ROOT.parent / "docs" / "architecture.md"

CLASS, FIELDS, FUNCTION, MODULE = 300, 12, 40, 400


def lines_of(node: ast.AST, source: list[str]) -> int:
    """The lines of code of a node."""
    skipped = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)) and inner.body:
            first = inner.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                skipped |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    start, end = getattr(node, "lineno", 1), getattr(node, "end_lineno", len(source)) or 0
    code = (source[number - 1].strip() for number in range(start, end + 1) if number not in skipped)
    return sum(bool(line) and not line.startswith("#") for line in code)


def is_value(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list) or any(
        ast.unparse(base) in ("NamedTuple", "TypedDict", "Protocol") for base in node.bases
    )


def fields_of(node: ast.ClassDef) -> int:
    """The attributes that methods of a class set on ``self``."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            found.add(inner.attr)
    return len(found)


def too_large() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        source, tree, name = text.splitlines(), ast.parse(text), str(path.relative_to(ROOT))
        if (size := lines_of(tree, source)) > MODULE:
            yield f"{name} ({size} lines)"
        for node in ast.walk(tree):
            if (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and (size := lines_of(node, source)) > FUNCTION
            ):
                yield f"{name}:{node.name} ({size} lines)"
            if isinstance(node, ast.ClassDef):
                if (size := lines_of(node, source)) > CLASS:
                    yield f"{name}:{node.name} ({size} lines)"
                if not is_value(node) and (count := fields_of(node)) > FIELDS:
                    yield f"{name}:{node.name} ({count} fields)"


if __name__ == "__main__":
    print(*too_large(), sep="\n")


def test_what_is_larger_says_why() -> None:
    reasons = DOCS.read_text()
    assert [found for found in too_large() if f"`{found.partition(' ')[0]}`" not in reasons] == []
