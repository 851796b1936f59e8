"""``TF_CONFIG``, and which ranks serve others."""

from __future__ import annotations

import json
from typing import Any

from planned import plans

from distributor.launch import TensorFlow
from distributor.values.plan import Plan


def tf_config(plan: Plan, local_rank: int) -> Any:
    return json.loads(plan.rank_env[local_rank]["TF_CONFIG"])


def test_tf_config_names_the_workers_and_the_ranks_own_task() -> None:
    first, second = plans(TensorFlow())
    workers = ["10.0.0.1:6000", "10.0.0.1:6020", "10.0.0.2:6010"]
    assert tf_config(first, 1) == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}
    assert tf_config(second, 0)["task"] == {"type": "worker", "index": 2}
    assert first.serving == ()


def test_tensorflows_parameter_servers_serve_and_the_evaluator_is_no_part_of_the_cluster() -> None:
    first, second = plans(TensorFlow(1, True), "abab")
    assert tf_config(first, 0)["cluster"] == {
        "chief": ["10.0.0.1:6000"],
        "worker": ["10.0.0.1:6020"],
        "ps": ["10.0.0.2:6010"],
    }
    assert [tf_config(second, local_rank)["task"]["type"] for local_rank in (0, 1)] == ["ps", "evaluator"]
    assert first.serving == second.serving == (1, 2)
    assert (first.serving_here, second.serving_here) == ({1}, {0})


def test_each_process_of_tensorflow_sees_its_own_gpus() -> None:
    first, _ = plans(TensorFlow(), use_gpu=True)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in first.rank_env] == ["0", "2"]
