"""Azure Machine Learning's distributions (SDK v2), and ``run`` and ``command`` to train with them here.

    from distributor.compat.azureml import PyTorchDistribution, run     # instead of: from azure.ai.ml import ...

    run("train.py", "--lr", 0.1, distribution=PyTorchDistribution(process_count_per_instance=2), instance_count=2)

An instance is a Spark executor. On this machine, the ranks of all instances train together.
Sources: https://learn.microsoft.com/python/api/azure-ai-ml/azure.ai.ml (the classes and ``command``),
https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu (what ranks find).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from distributor.api.target import named_module
from distributor.compat.commands import Program, parse
from distributor.compat.running import Request, run_first
from distributor.errors import ConfigurationError
from distributor.launch.mpi_env import MpiEnv
from distributor.launch.tensorflow import TensorFlow
from distributor.launch.torchrun import Torchrun
from distributor.ray.launch import Ray
from distributor.text import notices
from distributor.values.checks import check_count, check_env, check_title
from distributor.values.launch import Launch

#: Arguments of Azure's ``command`` that say where and under which labels Azure runs a job, and change nothing here.
NOT_USED = (
    *("compute", "description", "docker_args", "environment", "experiment_name", "identity", "instance_type"),
    *("is_deterministic", "job_tier", "locations", "name", "properties", "services", "shm_size", "tags", "timeout"),
)


class Distribution(Protocol):
    """How many processes a job has, and how they are started."""

    @property
    def per_instance(self) -> int | None:
        """The number of processes on each instance; ``None`` if it does not matter."""

    def processes(self, instance_count: int) -> int:
        """Return the number of processes of a job on this number of instances."""

    def launch(self, instance_count: int) -> Launch:
        """Return the launch path that starts them."""


@dataclass(frozen=True, kw_only=True)
class PyTorchDistribution:
    """Processes that find each other by torchrun's variables: ``RANK``, ``LOCAL_RANK``, ``NODE_RANK``, ....

    Args:
        process_count_per_instance: number of processes on each instance; ``None`` (default) is 1.

    Example:
        >>> PyTorchDistribution(process_count_per_instance=4).processes(instance_count=2)
        8
    """

    process_count_per_instance: int | None = None

    def __post_init__(self) -> None:
        _check_optional(self, "process_count_per_instance")

    @property
    def per_instance(self) -> int:
        """The number of processes on each instance."""
        return self.process_count_per_instance or 1

    def processes(self, instance_count: int) -> int:
        """Return the number of all processes."""
        return instance_count * self.per_instance

    def launch(self, instance_count: int) -> Launch:
        """Return torchrun's path."""
        return Torchrun()


@dataclass(frozen=True, kw_only=True)
class MpiDistribution(PyTorchDistribution):
    """Processes that read their rank from Open MPI's variables and Azure's. Nothing of MPI is started.

    Beside ``OMPI_COMM_WORLD_RANK`` and its relatives they find torchrun's variables, and the address of rank 0 in
    ``AZ_BATCH_MASTER_NODE`` and ``AZ_BATCHAI_MPI_MASTER_NODE``.

    Args:
        process_count_per_instance: number of processes on each instance; ``None`` (default) is 1.
    """

    def launch(self, instance_count: int) -> Launch:
        """Return the path that sets MPI's variables."""
        return MpiEnv()


@dataclass(frozen=True, kw_only=True)
class TensorFlowDistribution:
    """Tasks of a TensorFlow cluster, which find each other by ``TF_CONFIG``.

    With parameter servers, the first worker is the chief, which runs ``ParameterServerStrategy``.

    Args:
        parameter_server_count: number of parameter servers.
        worker_count: number of workers, the chief included; ``None`` (default): as many as instances.

    Example:
        >>> TensorFlowDistribution(parameter_server_count=1, worker_count=3).processes(instance_count=2)
        4
    """

    parameter_server_count: int | None = 0
    worker_count: int | None = None

    def __post_init__(self) -> None:
        if self.parameter_server_count != 0:
            _check_optional(self, "parameter_server_count")
        _check_optional(self, "worker_count")

    @property
    def per_instance(self) -> None:
        """No number: tasks are spread over the instances."""

    def processes(self, instance_count: int) -> int:
        """Return the number of all tasks."""
        return (self.parameter_server_count or 0) + (self.worker_count or instance_count)

    def launch(self, instance_count: int) -> Launch:
        """Return TensorFlow's path.

        Raises:
            ConfigurationError: there is no worker beside the chief.
        """
        servers, workers = self.parameter_server_count or 0, self.worker_count or instance_count
        if servers and workers < 2:
            raise ConfigurationError(
                f"worker_count={workers} leaves no worker beside the chief, which parameter_server_count={servers} "
                "needs: pass worker_count=2 or more"
            )
        return TensorFlow(parameter_servers=servers)


@dataclass(frozen=True, kw_only=True)
class RayDistribution:
    """A Ray cluster with one slot per instance, whose driver is the function, on the first instance.

    A slot has one GPU, or the CPUs of a Spark task: ``options={"gpus_per_process": 4}`` of ``run`` makes it larger.

    Args:
        port, dashboard_port: accepted and not used, with a warning: the run reserves free ports.
        include_dashboard: accepted and not used, with a warning if it is ``True``: there is no dashboard.
        address: refused: the run starts its own cluster.
        head_node_additional_args, worker_node_additional_args: refused: the run decides how Ray starts.

    Raises:
        ConfigurationError: a refused argument is given.
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
                f"address={self.address!r} names a Ray cluster, but the run starts its own: leave it out, or call "
                "ray.init(address=...) without a run"
            )
        for name in ("head_node_additional_args", "worker_node_additional_args"):
            if value := getattr(self, name):
                raise ConfigurationError(
                    f"{name}={value!r} cannot be used, since the run decides how Ray starts: leave it out. "
                    'options={"cpus_per_process": 4, "gpus_per_process": 1} of run sets what each instance offers'
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
        """One slot on each instance."""
        return 1

    def processes(self, instance_count: int) -> int:
        """Return the number of slots."""
        return instance_count

    def launch(self, instance_count: int) -> Launch:
        """Return Ray's path."""
        return Ray()


@dataclass(frozen=True)
class Command:
    """A job as ``command`` describes it. ``run`` runs it."""

    program: Program
    code: str | None = None
    distribution: Distribution = field(default_factory=PyTorchDistribution)
    instance_count: int = 1
    environment_variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    display_name: str | None = None


def command(
    *,
    command: str,
    code: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    distribution: Distribution | None = None,
    instance_count: int = 1,
    environment_variables: Mapping[str, str] | None = None,
    display_name: str | None = None,
    **others: Any,
) -> Command:
    """Describe a job, as ``azure.ai.ml.command`` does. Nothing starts.

    Args:
        command: ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS``; no shell runs it. ``${{inputs.NAME}}``
            is replaced by the input's value.
        code: the project folder, which becomes the ranks' current directory.
        inputs: values by name: text, numbers, or objects with a ``path``, such as Azure's ``Input``. Paths are taken as
            they are, and must exist on all nodes.
        distribution: how many processes each instance has and how they are started; default one, by torchrun's path.
        instance_count: number of instances.
        environment_variables: variables for the ranks.
        display_name: the run's name.
        others: what ``NOT_USED`` lists is accepted and not used, with a warning.

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
            f"command() cannot use {', '.join(unknown)}: leave it out. Results come back by what ranks return, and new "
            'files by options={"output_dir": ...} of run'
        )
    if others:
        notices.logger.warning("command: %s not used here: runs train on the Spark session", _are(sorted(others)))
    return Command(
        parse(command, inputs or {}),
        code,
        distribution or PyTorchDistribution(),
        check_count("instance_count", instance_count),
        check_env("environment_variables", environment_variables or {}),
        None if display_name is None else check_title("display_name", display_name),
    )


def run(
    target: Any,
    *args: Any,
    distribution: Distribution | None = None,
    instance_count: int = 1,
    environment_variables: Mapping[str, str] | None = None,
    code: str | None = None,
    use_gpu: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Train with one of Azure's distributions, and return rank 0's value; ``None`` for a script or a command.

    Args:
        target: a function, the path of a script, or what ``command`` returns.
        args: arguments of the function or the script.
        distribution: how many processes each instance has, and how they are started; default one, by torchrun's path.
        instance_count: number of instances, which are Spark executors, or all this machine.
        environment_variables: variables for the ranks.
        code: the project folder, which becomes the ranks' current directory.
        use_gpu: give each rank a GPU; ``None`` (default): if there are any.
        options: further options of ``Distributor`` by name, such as ``{"log_dir": "logs"}``.
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
            told = ", ".join(extra) or f"instance_count={instance_count}"
            raise ConfigurationError(f"{told}: a command has all of its arguments already: give them to command()")
        words = target.program.arguments
        what = named_module(target.program.name, words) if target.program.is_module else target.program.name
        args = () if target.program.is_module else words
        return run_first(_request(target, use_gpu, options), what, args)
    job = Command(
        Program(""),
        code,
        distribution or PyTorchDistribution(),
        check_count("instance_count", instance_count),
        check_env("environment_variables", environment_variables or {}),
    )
    return run_first(_request(job, use_gpu, options), target, args, kwargs)


def _request(job: Command, use_gpu: bool | None, options: Mapping[str, Any] | None) -> Request:
    """Return what a job asks for; options come last, so that they can override what the job says."""
    named = {"env": job.environment_variables, "working_dir": job.code, "name": job.display_name}
    return Request(
        asked=f"{type(job.distribution).__name__} on instance_count={job.instance_count}",
        parameter="instance_count",
        processes=job.distribution.processes(job.instance_count),
        use_gpu=use_gpu,
        per_node=job.distribution.per_instance,
        launch=job.distribution.launch(job.instance_count),
        options={**{name: value for name, value in named.items() if value}, **(options or {})},
    )


def _check_optional(value: Any, name: str) -> None:
    if getattr(value, name) is not None:
        check_count(name, getattr(value, name))


def _are(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
