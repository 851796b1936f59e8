"""The examples of docstrings hold."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "distributor"
WITH_EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text())


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_examples_hold(path: Path) -> None:
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(names).removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0
