from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TrainerCallback as TrainerCallback

DEFAULT_CALLBACKS: list[type[TrainerCallback]] = []


class TrainingArguments:
    def __init__(self, output_dir: str, *, report_to: str, max_steps: int, logging_steps: int, **others: Any) -> None:
        self.report_to, self.max_steps, self.logging_steps = report_to, max_steps, logging_steps
        self.run_name: str | None = others.get("run_name")


class Trainer:
    def __init__(self, model: Any, args: TrainingArguments, **_: Any) -> None:
        self.args = args
        reporting = [] if args.report_to == "none" else [INTEGRATION_TO_CALLBACK[args.report_to]]
        self._callbacks = [each() for each in (*DEFAULT_CALLBACKS, *reporting)]

    def train(self) -> None:
        self._call("on_train_begin", 0)
        for step in range(1, self.args.max_steps + 1):
            self._call("on_step_end", step)
            if step % self.args.logging_steps == 0:
                self._call("on_log", step, logs={"loss": 1.0 / step})
        self._call("on_train_end", self.args.max_steps)

    def _call(self, event: str, step: int, **kwargs: Any) -> None:
        state = SimpleNamespace(global_step=step, max_steps=self.args.max_steps, is_world_process_zero=True)
        for each in self._callbacks:
            getattr(each, event)(self.args, state, None, **kwargs)
