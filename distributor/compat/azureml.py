"""Azure Machine Learning's distributions (SDK v2), and ``command`` and ``run`` to train with them on Spark.

    from distributor.compat.azureml import PyTorchDistribution, run     # instead of: from azure.ai.ml import ...

    run("train.py", "--lr", 0.1, distribution=PyTorchDistribution(process_count_per_instance=2), instance_count=2)

One of Azure's instances is a Spark executor here. Without executors, all ranks train on this machine.

Sources: https://learn.microsoft.com/python/api/azure-ai-ml/azure.ai.ml (classes and ``command``),
https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu (environment variables).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from distributor.api.target import named_module
from distributor.compat.commands import Program, parse
from distributor.compat.descriptions import (
    AssetTypes as AssetTypes,
    Input as Input,
    JobResourceConfiguration as JobResourceConfiguration,
    ResourceConfiguration as ResourceConfiguration,
    instances,
    not_used,
)
from distributor.compat.refused import refusal
from distributor.compat.running import Request, run_first, with_options
from distributor.errors import ConfigurationError
from distributor.launch.mpi.env import MpiEnv
from distributor.launch.ray.path import Ray
from distributor.launch.tensorflow.path import TensorFlow
from distributor.launch.torchrun import Torchrun
from distributor.text import notices
from distributor.values.checks import check_choice, check_count, check_env, check_title
from distributor.values.launch_path import Launch

#: Arguments of Azure's ``command`` about where Azure runs a job and how it labels the job. They have no effect.
NOT_USED = (
    *("compute", "description", "docker_args", "environment", "experiment_name", "identity", "instance_type"),
    *("is_deterministic", "job_tier", "locations", "name", "parent_job_name", "priority", "properties", "services"),
    *("shm_size", "tags", "timeout"),
)


class Distribution(Protocol):
    """How many processes a job has, and how they are started."""

    @property
    def per_instance(self) -> int | None:
        """The number of processes on each instance; ``None`` if this number is not fixed."""

    def processes(self, instance_count: int) -> int:
        """Return the number of processes of a job with ``instance_count`` instances."""

    def launch(self, instance_count: int) -> Launch:
        """Return the launch path that starts the job's processes."""


class _Counts:
    """Checks each number, in the constructor and when it is assigned later."""

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None and (name, value) != ("parameter_server_count", 0):
            check_count(name, value)
        super().__setattr__(name, value)


@dataclass(init=False)
class PyTorchDistribution(_Counts):
    """Processes that find each other through torchrun's variables, such as ``RANK``, ``LOCAL_RANK`` and ``NODE_RANK``.

    Each instance has one by default. Other arguments, such as ``node_count``, have no effect, with a warning.

    Example:
        >>> PyTorchDistribution(process_count_per_instance=4).processes(instance_count=2)
        8
    """

    process_count_per_instance: int | None = None

    def __init__(self, *, process_count_per_instance: int | None = None, **others: Any) -> None:
        self.process_count_per_instance = process_count_per_instance
        not_used(type(self).__name__, others)

    @property
    def per_instance(self) -> int:
        return self.process_count_per_instance or 1

    def processes(self, instance_count: int) -> int:
        return instance_count * self.per_instance

    def launch(self, instance_count: int) -> Launch:
        return Torchrun()


@dataclass(init=False)
class MpiDistribution(PyTorchDistribution):
    """Processes that read their rank from Open MPI's variables, such as ``OMPI_COMM_WORLD_RANK``. MPI is not started.

    They also get torchrun's variables, and the address of rank 0 as ``AZ_BATCH_MASTER_NODE`` (with a port) and
    ``AZ_BATCHAI_MPI_MASTER_NODE``. Arguments are those of :class:`PyTorchDistribution`.

    Example:
        >>> MpiDistribution(process_count_per_instance=4).processes(instance_count=2)
        8
    """

    def launch(self, instance_count: int) -> Launch:
        return MpiEnv()


@dataclass(init=False)
class TensorFlowDistribution(_Counts):
    """Tasks of a TensorFlow cluster, which find each other through ``TF_CONFIG``.

    With parameter servers, the first worker is the chief. ``worker_count`` includes it; by default, it is the number of
    instances. Other arguments have no effect, with a warning.

    Example:
        >>> TensorFlowDistribution(parameter_server_count=1, worker_count=3).processes(instance_count=2)
        4
    """

    parameter_server_count: int | None = 0
    worker_count: int | None = None

    def __init__(
        self, *, parameter_server_count: int | None = 0, worker_count: int | None = None, **others: Any
    ) -> None:
        self.parameter_server_count = parameter_server_count
        self.worker_count = worker_count
        not_used("TensorFlowDistribution", others)

    @property
    def per_instance(self) -> None:
        """``None``: the number of tasks on each instance is not fixed."""

    def processes(self, instance_count: int) -> int:
        return (self.parameter_server_count or 0) + (self.worker_count or instance_count)

    def launch(self, instance_count: int) -> Launch:
        servers, workers = self.parameter_server_count or 0, self.worker_count or instance_count
        if servers and workers < 2:
            raise ConfigurationError(
                f"parameter_server_count={servers} needs a worker besides the chief, but worker_count={workers} leaves "
                "none: pass worker_count=2 or more"
            )
        return TensorFlow(parameter_servers=servers)


@dataclass(frozen=True, kw_only=True)
class RayDistribution:
    """A Ray cluster of all instances; the user's function runs on the first instance, as Ray's driver.

    Each instance adds the CPUs of one Spark task and, if the run uses GPUs, one GPU. Options of the run, such as
    ``run(..., options={"gpus_per_process": 4})``, change that. Ports and ``include_dashboard`` have no effect, with a
    warning; ``address`` and additional arguments of nodes are refused, since the run itself starts Ray.
    """

    port: int | None = None
    address: str | None = None
    include_dashboard: bool | None = None
    dashboard_port: int | None = None
    head_node_additional_args: str | None = None
    worker_node_additional_args: str | None = None

    def __post_init__(self) -> None:
        if self.address:
            raise ConfigurationError(
                f"address={self.address!r} names a Ray cluster, but the run starts its own: leave address out, or "
                "call ray.init(address=...) without a run"
            )
        for name in ("head_node_additional_args", "worker_node_additional_args"):
            if value := getattr(self, name):
                raise ConfigurationError(
                    f"{name}={value!r} cannot be used, since the run decides how Ray starts: leave it out. "
                    'To set what each instance offers, pass options={"cpus_per_process": 4, "gpus_per_process": 1} to '
                    "run()"
                )
        for name in ("port", "dashboard_port", "include_dashboard"):
            if value := getattr(self, name):
                notices.logger.warning(
                    "RayDistribution: %s=%r is not used: the run reserves free ports, and starts no dashboard",
                    name,
                    value,
                )

    @property
    def per_instance(self) -> int:
        return 1

    def processes(self, instance_count: int) -> int:
        return instance_count

    def launch(self, instance_count: int) -> Launch:
        return Ray()


#: By the ``type`` that names the distribution in a dict.
_KINDS: Mapping[str, Callable[..., Distribution]] = {
    "pytorch": PyTorchDistribution,
    "mpi": MpiDistribution,
    "tensorflow": TensorFlowDistribution,
    "ray": RayDistribution,
}


def as_distribution(value: Any) -> Distribution:
    """Return a distribution given as an object, as a dict with a ``type``, or as ``None``: one process per instance.

    >>> as_distribution({"type": "PyTorch", "process_count_per_instance": 4})
    PyTorchDistribution(process_count_per_instance=4)
    """
    if value is None:
        return PyTorchDistribution()
    if isinstance(value, (PyTorchDistribution, TensorFlowDistribution, RayDistribution)):
        return value
    given = dict(value) if isinstance(value, Mapping) else {}
    kind = str(given.pop("type", "")).lower()
    if kind not in _KINDS:
        raise ConfigurationError(
            "distribution must be PyTorchDistribution, MpiDistribution, TensorFlowDistribution or RayDistribution of "
            f'distributor.compat.azureml, or a dict such as {{"type": "pytorch"}}, not {value!r}'
        )
    try:
        return _KINDS[kind](**given)
    except TypeError as error:
        raise ConfigurationError(f"distribution={value!r} cannot be used: {error}") from None


@dataclass
class Command:
    """A job that ``command`` returns and ``run`` accepts. Users can change its attributes, as in Azure's jobs.

    Those in :data:`NOT_USED` have no effect, with a warning. A wrong value, or any other name, is a ConfigurationError.
    """

    program: Program
    code: str | None = None
    distribution: Distribution = field(default_factory=PyTorchDistribution)
    instance_count: int = 1
    environment_variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    display_name: str | None = None
    resources: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NOT_USED:
            return not_used("command", {name: value})
        if name not in _ATTRIBUTES:
            raise ConfigurationError(
                f"a command has no attribute {name!r} here: leave it out, or set one of {', '.join(_ATTRIBUTES)}"
            )
        super().__setattr__(name, _ATTRIBUTES[name](value))
        return None

    @property
    def instances(self) -> int:
        """The number of instances in ``resources`` or, if they state none, ``instance_count``."""
        return instances(self.resources) or self.instance_count


def _checked_resources(value: Any) -> Any:
    instances(value)
    return value


#: The attributes of a command, and what checks their values.
_ATTRIBUTES: Mapping[str, Callable[[Any], Any]] = {
    "program": lambda value: value,
    "code": lambda value: None if value is None else str(value),
    "distribution": as_distribution,
    "instance_count": lambda value: check_count("instance_count", value),
    "environment_variables": lambda value: check_env("environment_variables", value or {}),
    "display_name": lambda value: None if value is None else check_title("display_name", value),
    "resources": _checked_resources,
}


def command(
    *,
    command: str,
    code: str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    distribution: Distribution | Mapping[str, Any] | None = None,
    instance_count: int = 1,
    environment_variables: Mapping[str, str] | None = None,
    display_name: str | None = None,
    resources: Any = None,
    **others: Any,
) -> Command:
    """Describe a job, as ``azure.ai.ml.command`` does. ``run`` starts the job.

    Args:
        command: ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS``; no shell is used. The value of an input
            replaces ``${{inputs.NAME}}``.
        code: the project folder, which becomes the ranks' current directory.
        inputs: text, numbers, or objects with a ``path``, such as ``Input``, by name. Paths must exist on all nodes.
        distribution: how many processes each instance has, and how they are started; an object, or a dict such as
            ``{"type": "pytorch"}``. Default: one process, started as with torchrun.
        instance_count: number of instances.
        environment_variables: environment variables for the ranks.
        display_name: the run's name.
        resources: another way to give ``instance_count``: ``ResourceConfiguration``, or a dict.
        others: those that ``NOT_USED`` lists have no effect, with a warning.

    Raises:
        ConfigurationError: an argument is wrong, or the command needs a shell.

    Example:
        >>> job = command(command="python train.py --lr ${{inputs.lr}}", inputs={"lr": 0.1}, instance_count=2)
        >>> job.program.arguments
        ('--lr', '0.1')
    """
    unknown = [name for name in others if name not in NOT_USED]
    if unknown:
        raise ConfigurationError(
            f"command() cannot use {', '.join(unknown)}: leave it out. To keep the files that ranks write, call "
            'run(..., options={"output_dir": ...})'
        )
    not_used("command", others)
    return Command(
        parse(command, inputs or {}),
        None if code is None else str(code),
        as_distribution(distribution),
        instance_count,
        environment_variables or {},
        display_name,
        resources,
    )


def run(
    target: Any,
    *args: Any,
    distribution: Distribution | Mapping[str, Any] | None = None,
    instance_count: int = 1,
    environment_variables: Mapping[str, str] | None = None,
    code: str | os.PathLike[str] | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Train with one of Azure's distributions, and return rank 0's value; ``None`` for a script or a command.

    Args:
        target: a function, the path of a script, or a job that ``command`` has returned.
        args: arguments of the function or the script.
        distribution: as for :func:`command`.
        instance_count: number of instances. Each is a Spark executor; without executors, the ranks of all instances
            train on this machine.
        environment_variables: environment variables for the ranks.
        code: the project folder, which becomes the ranks' current directory.
        use_gpu: whether each rank gets a GPU. ``None`` (default): each rank gets one if Spark's settings give GPUs to
            executors or, without executors, if this machine has GPUs.
        options: further options of ``Distributor`` by name, such as ``{"log_dir": "logs"}``, except for what ``run``
            itself sets. ``{"local_mode": True}`` trains on this machine, even if a Spark session is active.
        kwargs: keyword arguments of the function.

    Raises:
        ConfigurationError: an argument is wrong; nothing was started.
        TrainingError: a rank failed.

    Example:
        >>> run(train, 1e-3, distribution=MpiDistribution(process_count_per_instance=2))  # doctest: +SKIP
    """
    if isinstance(target, Command):
        given = {"distribution": distribution, "environment_variables": environment_variables, "code": code, **kwargs}
        extra = [*map(repr, args), *(name for name, value in given.items() if value is not None)]
        if extra or instance_count != 1:
            names = ", ".join(extra) or f"instance_count={instance_count}"
            raise ConfigurationError(
                f"{names} cannot be passed to run() with a command, which has its own arguments: pass them to command()"
            )
        words = target.program.arguments
        train_object = named_module(target.program.name, words) if target.program.is_module else target.program.name
        args = () if target.program.is_module else words
        return run_first(_request(target, use_gpu, options), train_object, args)
    job = Command(
        Program(""),
        None if code is None else str(code),
        as_distribution(distribution),
        instance_count,
        environment_variables or {},
    )
    return run_first(_request(job, use_gpu, options), target, args, kwargs)


def _request(job: Command, use_gpu: bool | None, options: Mapping[str, Any] | None) -> Request:
    """Return a job's request to ``Distributor``. ``options`` override the job's own values."""
    named = {"env": job.environment_variables, "working_dir": job.code, "name": job.display_name}
    request = Request(
        asked=f"{type(job.distribution).__name__} on instance_count={job.instances}",
        parameter="instance_count",
        processes=job.distribution.processes(job.instances),
        use_gpu=check_choice("use_gpu", use_gpu),
        per_node=job.distribution.per_instance,
        launch=job.distribution.launch(job.instances),
        options={name: value for name, value in named.items() if value},
    )
    return with_options(request, options)


def __getattr__(name: str) -> Any:
    raise refusal("azure.ai.ml", name)
