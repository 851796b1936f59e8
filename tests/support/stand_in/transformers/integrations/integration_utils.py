from __future__ import annotations

import os
import time
from typing import Any


class TrainerCallback:
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None: ...

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class MLflowCallback(TrainerCallback):
    def __init__(self) -> None:
        import mlflow

        self._mlflow, self._ends = mlflow, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._mlflow.active_run() is None:
            if experiment := os.getenv("MLFLOW_EXPERIMENT_NAME"):
                self._mlflow.set_experiment(experiment)
            self._mlflow.start_run(run_name=args.run_name)
            self._ends = True
        self._mlflow.log_params({"max_steps": args.max_steps}, synchronous=False)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        time.sleep(0.002)  # MLflow keeps one of two equal values of a millisecond
        self._mlflow.log_metrics(metrics=logs, step=state.global_step, synchronous=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ends and self._mlflow.active_run():
            self._mlflow.end_run()

    def __del__(self) -> None:
        if self._ends and self._mlflow.active_run() is not None:
            self._mlflow.end_run()


INTEGRATION_TO_CALLBACK = {"mlflow": MLflowCallback}
