"""Notes what was run, for the table of ``docs/frameworks.md``: ``FRAMEWORKS_OUT=FILE`` writes it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
from sessions import LOCAL

#: What a test of a framework tells of itself: system, distribution, row, where it runs.
_PROPERTY = "framework"


#: The tests that CI runs: what each framework is there for, and that its first failure is told.
CI = (
    *("ranks_train_as_the_file_says", "a_file_that_does_not_suit_the_run"),  # Accelerate
    *("numbers_of_a_trainer_are_those_of_the_run", "on_executors"),  # Lightning
    *("ddp_trains_a_perceptron", "fsdp_checkpoints_are_loaded_by_another_number_of_ranks"),  # PyTorch
    *("a_trainers_script", "a_function_that_parses_a_command_line", "the_trainer_resumes_its_own_checkpoint"),
    *("a_sum_over_all_processes", "all_ranks_are_mpis_processes", "ranks_spawn_processes", "ranks_meet"),  # JAX, MPI
    *("each_node_offers_its_slots", "torch_trainer_with_ray_data", "a_failure_is_told"),  # Ray
    *("workers_mirror_each_other", "parameter_servers_end_with_the_chief"),  # TensorFlow
    *("the_rank_that_failed_is_the_root", "a_killed_driver_leaves_nothing", "a_run_goes_on_in_a_new_job"),
    *("a_function_runs_once_as_rays_driver", "azures_tensorflow_has_a_chief_workers_and_servers"),
)


def pytest_itemcollected(item: pytest.Item) -> None:
    if getattr(item, "originalname", item.name).removeprefix("test_") not in CI:
        item.add_marker("long")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("framework")
        if mark is None:
            continue
        system, distribution, *row = mark.args
        params = getattr(item, "callspec", None)
        mode = None if params is None else params.params.get("mode")
        where = mark.kwargs.get("where") or ("local" if mode in (None, LOCAL) else "executors")
        name = row[0] if row else str(item.name).partition("[")[0].removeprefix("test_").replace("_", " ")
        item.user_properties.append((_PROPERTY, [system, distribution, name, where]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    path = os.environ.get("FRAMEWORKS_OUT")
    if path is None:
        return
    found: dict[str, dict[str, Any]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            told = dict(getattr(report, "user_properties", ())).get(_PROPERTY)
            if told is None or (outcome == "passed" and report.when != "call"):
                continue
            system, distribution, name, where = told
            row = found.setdefault(f"{system}: {name}", {"system": system, "row": name})
            row["version"] = f"{distribution} {importlib.metadata.version(distribution)}"
            row["python"] = platform.python_version()
            row[where] = "failed" if outcome != "passed" or row.get(where) == "failed" else "passed"
    known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
    Path(path).write_text(json.dumps({**known, **found}, indent=1, sort_keys=True) + "\n")
