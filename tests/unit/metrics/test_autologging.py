"""What logs to MLflow by itself, in a rank whose run the driver's callback tracks."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings

from distributor.metrics import autologging


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autologging, "_told", set())
    for name in ("_run", "_seen", "_quiet"):
        monkeypatch.setattr(autologging, name, getattr(autologging, name))


@pytest.mark.slow
def test_transformers_trains_and_logs_nothing_to_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    integrations: Any = pytest.importorskip("transformers.integrations.integration_utils")
    table = integrations.INTEGRATION_TO_CALLBACK
    monkeypatch.setitem(table, "mlflow", table["mlflow"])  # undone at the end
    autologging._replace_callback(integrations)
    arguments = transformers.TrainingArguments(
        str(tmp_path), report_to="mlflow", max_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = transformers.Trainer(trainings.squared(), arguments, train_dataset=[{"x": torch.ones(1)}] * 4)
    trainer.train()
    trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count('report_to="mlflow" does nothing in ranks') == 1
    assert not (tmp_path / "mlruns").exists()


def test_into_a_run_of_the_code_autologging_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        pass

    class Logging(Base):
        pass

    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="3f2a"))
    fluent = types.SimpleNamespace(active_run=lambda: run)
    monkeypatch.setitem(sys.modules, "mlflow", fluent)
    utils = types.SimpleNamespace(autologging_is_disabled=lambda name: name == "sklearn")
    integrations = types.SimpleNamespace(INTEGRATION_TO_CALLBACK={"mlflow": Logging}, TrainerCallback=Base)
    autologging._switch_off(utils)
    autologging._replace_callback(integrations)
    assert (utils.autologging_is_disabled("sklearn"), utils.autologging_is_disabled("pytorch")) == (True, False)
    assert type(integrations.INTEGRATION_TO_CALLBACK["mlflow"]()) is Logging
    fluent.active_run = lambda: None
    assert utils.autologging_is_disabled("pytorch")
    assert type(integrations.INTEGRATION_TO_CALLBACK["mlflow"]()) is not Logging
    monkeypatch.setenv("MLFLOW_RUN_ID", "3f2a")
    for rank, disabled in (("0", False), ("1", True)):
        monkeypatch.setenv("RANK", rank)
        assert utils.autologging_is_disabled("pytorch") == disabled


class Fluent:
    """The part of MLflow that a rank uses; a run can be started until ``refuses``, and seen while ``answers``."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.ended: list[str] = []
        self.refuses = False
        self.answers = True
        fluent = self

        class MlflowClient:
            def get_run(self, run: str) -> None:
                if not fluent.answers:
                    raise OSError("down")

            def set_terminated(self, run_id: str, status: str = "FINISHED") -> None:
                fluent.ended.append(run_id)

        self.MlflowClient = MlflowClient

    def active_run(self) -> Any:
        return self.started[-1] if self.started else None

    def start_run(self, run_id: str | None = None, tags: Any = None) -> Any:
        if self.refuses:
            raise ValueError("another experiment")
        self.started.append(types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "new")))
        return self.started[-1]

    def end_run(self) -> None:
        self.MlflowClient().set_terminated(self.started.pop().info.run_id)


def test_autologging_starts_our_run_and_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fluent: Any = Fluent()
    monkeypatch.setitem(sys.modules, "mlflow", fluent)
    autologging.leave_to_driver("ours", 0)
    fluent.start_run(tags={"mlflow.autologging": "sklearn"})
    assert autologging.is_joined()
    fluent.end_run()
    assert fluent.ended == [] and not autologging.is_joined()
    fluent.start_run()
    assert not autologging.is_joined()
    fluent.end_run()
    assert fluent.ended == ["new"]


def test_autologging_starts_no_run_beside_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fluent: Any = Fluent()
    fluent.answers = False
    monkeypatch.setitem(sys.modules, "mlflow", fluent)
    autologging.leave_to_driver("ours", 0)
    utils = types.SimpleNamespace(autologging_is_disabled=lambda name: False)
    autologging._switch_off(utils)
    assert not utils.autologging_is_disabled("sklearn")
    with pytest.raises(LookupError):
        fluent.start_run(tags={"mlflow.autologging": "sklearn"})
    assert fluent.started == [] and utils.autologging_is_disabled("sklearn")
    assert caplog.text.count("mlflow.autolog() does nothing in ranks") == 1


@pytest.mark.parametrize("what", ["joins", "answers not", "refuses", "another rank", "unknown"])
def test_a_trainer_logs_to_our_run_or_does_nothing(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fluent: Any = Fluent()
    fluent.answers, fluent.refuses = what != "answers not", what == "refuses"
    calls: list[str] = []

    class Logging:
        def on_train_begin(self) -> None:
            calls.append("begin")

        def on_log(self) -> None:
            calls.append("log")

        def on_train_end(self) -> None:
            calls.append("end")

    monkeypatch.setitem(sys.modules, "mlflow", fluent)
    autologging.leave_to_driver("" if what == "unknown" else "ours", int(what == "another rank"))
    integrations = types.SimpleNamespace(INTEGRATION_TO_CALLBACK={"mlflow": Logging}, TrainerCallback=object)
    autologging._replace_callback(integrations)
    callback: Any = integrations.INTEGRATION_TO_CALLBACK["mlflow"]()
    callback.on_log()  # the driver has what is logged before training
    callback.on_train_begin()
    callback.on_log()
    assert autologging.is_joined() == (what == "joins")
    callback.on_train_end()
    callback.on_log()
    assert calls == (["begin", "log", "end"] if what == "joins" else [])
    assert not autologging.is_joined() and fluent.ended == []
    assert ("does nothing in ranks" in caplog.text) == (what not in ("joins", "another rank"))


@pytest.mark.parametrize("module", [types.SimpleNamespace(), types.SimpleNamespace(INTEGRATION_TO_CALLBACK={})])
def test_other_versions_are_left_alone(module: Any) -> None:
    before = dict(vars(module))
    autologging._switch_off(module)
    autologging._replace_callback(module)
    assert vars(module) == before
