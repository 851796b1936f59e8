"""A CUDA without GPUs, for tests of copies."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch = pytest.importorskip("torch")
    from fake_gpu import FakeCuda

    made = FakeCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    return made
