"""What Trainers of frameworks report by themselves, with their own defaults."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributor.metrics import rank as reports, trainers
from distributor.values.reports import LONGEST, Report, Warned, parse

STEPS = 5


@pytest.mark.parametrize(("interval", "steps"), [(0.0, {*range(1, STEPS + 1)}), (3600.0, {1, STEPS})])
def test_lightning_reports_steps_even_if_the_code_logs_nothing(
    interval: float, steps: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning: Any = pytest.importorskip("pytorch_lightning")
    call = importlib.import_module("pytorch_lightning.trainer.call")
    monkeypatch.setattr(call, "_call_callback_hooks", call._call_callback_hooks)  # undone at the end
    monkeypatch.setattr(trainers, "_INTERVAL", interval)
    reported: list[Any] = []
    monkeypatch.setattr(reports, "add", lambda values, step, total, tracked: reported.append((step, total)))
    trainers._watch_steps(call)

    class Silent(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = lightning.Trainer(accelerator="cpu", max_steps=STEPS, default_root_dir=tmp_path)
    trainer.fit(Silent(), torch.utils.data.DataLoader(torch.ones(2 * STEPS, 1)))
    assert {*reported} == {(step, STEPS) for step in steps}


def test_an_evaluation_without_a_training_has_no_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(reports, "add", lambda *values, tracked: reported.append(values))
    transformers = SimpleNamespace(DEFAULT_CALLBACKS=[], TrainerCallback=object)
    trainers._watch_transformers(transformers)
    (callback,) = transformers.DEFAULT_CALLBACKS
    callback().on_log(None, SimpleNamespace(global_step=0, max_steps=0), None, {"eval_loss": 0.5})
    callback().on_log(None, SimpleNamespace(global_step=3, max_steps=5), None, {"loss": 0.25})
    assert reported == [({"eval_loss": 0.5}, 0, None), ({"loss": 0.25}, 3, 5)]


def test_a_log_that_is_too_long_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an evaluation with a value for each of thousands of classes."""
    monkeypatch.setattr(reports, "_writer", reports.Writer(tmp_path / "reports", 1 << 20, 0))
    trainers._report({f"{number}": 0.25 for number in range(LONGEST // 8)}, 1, 2)
    trainers._report({"loss": 0.5}, 2, 2)
    warned, report = map(parse, (tmp_path / "reports").read_bytes().splitlines())
    assert isinstance(warned, Warned)
    assert "what a Trainer has logged is left out: report() was given" in warned.text
    assert isinstance(report, Report)
    assert report.values == {"loss": 0.5}
