"""The launch path for TensorFlow: ``TF_CONFIG`` describes the cluster, and the task of each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from distributor.errors import ConfigurationError
from distributor.launch.torchrun import Torchrun
from distributor.machine import devices
from distributor.text import wording
from distributor.values.checks import check_count, check_flag
from distributor.values.job import Job
from distributor.values.launch_path import BasePath
from distributor.values.outcome import Failure
from distributor.values.placement import Share
from distributor.values.plan import Call, Plan, Site

_KERAS = (
    "Keras 3 does not train with strategies of several processes: write the loop with strategy.run, or install "
    'tf_keras and pass env={"TF_USE_LEGACY_KERAS": "1"}'
)


@dataclass(frozen=True)
class Task:
    """A rank in TensorFlow's terms: the kind of its task, and its number among the tasks of that kind."""

    kind: str
    index: int


@dataclass(frozen=True)
class TensorFlow(BasePath):
    """The launch path for TensorFlow: ``TF_CONFIG`` describes the cluster, and the task of each process.

    Without parameter servers, all processes but the evaluator are workers of ``MultiWorkerMirroredStrategy``. Worker 0
    is rank 0. With ``evaluator=True``, with or without parameter servers, the last rank is the evaluator.

    With parameter servers, rank 0 is the chief, which runs ``ParameterServerStrategy``. The workers come next, and then
    the servers; workers and servers run ``tf.distribute.Server(...).join()``. They never end by themselves. Once the
    chief (and the evaluator, if there is one) has succeeded, the run stops the workers and servers, and succeeds.

    Args:
        parameter_servers: number of processes that are parameter servers.
        evaluator: whether the last process is an evaluator, which is not part of the cluster.

    Example:
        >>> from distributor import Distributor
        >>> Distributor(4, launch=TensorFlow(parameter_servers=1)).run(train)  # doctest: +SKIP
    """

    name: ClassVar[str] = "tensorflow"
    preload: ClassVar[tuple[str, ...]] = ("tensorflow",)
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({"tensorflow": "launch=TensorFlow()"})
    ports: ClassVar[int] = 1
    all_nodes: ClassVar[bool] = True

    parameter_servers: int = 0
    evaluator: bool = False

    def resolve(self, num_processes: int, use_gpu: bool) -> TensorFlow:
        servers = check_count("parameter_servers", self.parameter_servers, least=0)
        evaluator = check_flag("evaluator", self.evaluator)
        least = servers + evaluator + (2 if servers else 1)
        if num_processes < least:
            kinds = ["a chief", "a worker", f"{servers} parameter server{'s' if servers > 1 else ''}"]
            kinds = [*(kinds if servers else ["a worker"]), *(["an evaluator"] if evaluator else [])]
            raise ConfigurationError(
                f"num_processes={num_processes} is too few for {', '.join(kinds)}: it counts all processes, so raise "
                f"it to {least} or more"
            )
        return TensorFlow(servers, evaluator)

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        # Hides TensorFlow's own messages, such as errors about the missing CUDA driver.
        return {} if use_gpu else {"TF_CPP_MIN_LOG_LEVEL": "3"}

    def advise(self, failure: Failure, job: Job) -> str:
        text = f"{failure.message}\n{failure.traceback}"
        return _KERAS if "keras/src/" in text and "tf_keras" not in text and job.resources.num_processes > 1 else ""

    def plan(self, site: Site) -> Plan:
        plan, node, placement = Torchrun().plan(site), site.node, site.placement
        tasks = self.tasks(placement.world_size)
        cluster = _cluster(tasks, placement)
        use_gpu = site.job.resources.use_gpu
        refuse = Call("distributor.launch.tensorflow.keras", "refuse_keras_3", {"advice": _KERAS})
        return replace(
            plan,
            first=refuse if placement.world_size > 1 else None,
            rank_env=tuple(
                {
                    **env,
                    "TF_CONFIG": json.dumps(
                        {
                            "cluster": cluster,
                            "task": {"type": task.kind, "index": task.index},
                        }
                    ),
                    # TensorFlow takes all GPUs that it sees, so each rank sees only its own.
                    **devices.rank_visibility(node.gpus[local_rank :: node.local_world_size], use_gpu),
                }
                for local_rank, (env, task) in enumerate(zip(plan.rank_env, tasks[node.first_rank :]))
            ),
            serving=tuple(
                rank for rank, task in enumerate(tasks) if self.parameter_servers and task.kind in ("worker", "ps")
            ),
        )

    def tasks(self, world_size: int) -> tuple[Task, ...]:
        """Return the task of each rank.

        >>> " ".join(f"{task.kind}-{task.index}" for task in TensorFlow(1, True).tasks(4))
        'chief-0 worker-0 ps-0 evaluator-0'
        """
        chiefs = 1 if self.parameter_servers else 0
        workers = world_size - chiefs - self.parameter_servers - self.evaluator
        counts = {"chief": chiefs, "worker": workers, "ps": self.parameter_servers, "evaluator": int(self.evaluator)}
        return tuple(Task(kind, index) for kind, number in counts.items() for index in range(number))


def _cluster(tasks: Sequence[Task], placement: Share) -> dict[str, list[str]]:
    # https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
    cluster: dict[str, list[str]] = {}
    places = [(node.address, port) for node in placement.nodes for port in node.ports]
    for task, (address, port) in zip(tasks, places):
        if task.kind != "evaluator":
            cluster.setdefault(task.kind, []).append(wording.address(address, port))
    return cluster
