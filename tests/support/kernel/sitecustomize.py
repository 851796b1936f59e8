"""Imported by each Python that a notebook under test starts: declares torchvision's operators when it is imported."""

from __future__ import annotations

import runpy
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class BeforeTorchvision(MetaPathFinder):
    """Finds nothing."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            runpy.run_path(str(Path(__file__).parent.parent / "vision_ops.py"))["declare"]()


sys.meta_path.insert(0, BeforeTorchvision())
