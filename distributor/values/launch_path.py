"""Launch paths: frozen dataclasses in the job that define how ranks are started, such as torchrun's or Ray's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

if TYPE_CHECKING:
    from distributor.values.job import Job
    from distributor.values.outcome import Failure
    from distributor.values.plan import Plan, Site


class LaunchPath(Protocol):
    """Says how a job's ranks are started. It is a part of the job, and its methods have no side effects."""

    @property
    def name(self) -> str:
        """The launch path's name, as users pass it in ``launch=`` and as a dry run shows it."""

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules that a warm process (which forks agents) imports in addition to torch."""

    @property
    def needs(self) -> Mapping[str, str]:
        """The modules that ranks must be able to import, each with the option that requires it: ``launch=Ray()``."""

    @property
    def ports(self) -> int:
        """The number of ports to reserve for each of the run's processes. Every node learns node 0's and its own."""

    @property
    def all_nodes(self) -> bool:
        """Whether the plan of a node depends on all nodes: ``site.placement.nodes`` is empty otherwise."""

    @property
    def once(self) -> bool:
        """Whether the target runs once, on node 0, instead of in each of the run's processes."""

    @property
    def restarts(self) -> bool:
        """Whether the run's processes can be started again on the same nodes. If not, a new job restarts them."""

    @property
    def uses_torch(self) -> bool:
        """Whether ranks compute with torch. If not, nothing asks torch for GPUs, and torch may be built for CPUs."""

    @property
    def spark_prefix(self) -> str:
        """The prefix of PySpark's setting ``….spark.distributor.ignoreSsl`` that applies to the run."""

    @property
    def deepspeed_config(self) -> str | None:
        """The final DeepSpeed configuration as JSON, for the user; ``None`` without one."""

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        """Return the environment variables that all ranks get, unless the user's own variables override them.

        The processes that import torch for ranks have these variables too, before they import torch.
        """

    def plan(self, site: Site) -> Plan:
        """Return the plan of one node, which says what the node does to start its ranks."""

    def advise(self, failure: Failure, job: Job) -> str:
        """Return advice for the user on a failure that comes from this way of starting ranks, or ``""``."""


class BasePath:
    """Defaults of :class:`LaunchPath`, from which launch paths inherit."""

    preload: ClassVar[tuple[str, ...]] = ()
    ports: ClassVar[int] = 0
    all_nodes: ClassVar[bool] = False
    once: ClassVar[bool] = False
    restarts: ClassVar[bool] = False
    uses_torch: ClassVar[bool] = False
    spark_prefix: ClassVar[str] = "pytorch"

    def resolve(self, num_processes: int, use_gpu: bool) -> Self:
        return self

    @property
    def needs(self) -> Mapping[str, str]:
        return {}

    @property
    def deepspeed_config(self) -> str | None:
        return None

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        return {}

    def advise(self, failure: Failure, job: Job) -> str:
        return ""


class Launch(Protocol):
    """A value that users pass as ``launch=``."""

    def resolve(self, num_processes: int, use_gpu: bool) -> LaunchPath:
        """Return the launch path (how ranks are started) of a run. This method may read files on the driver.

        Raises:
            ConfigurationError: this value of ``launch=`` is wrong, or does not suit the number of ranks or the use of
                GPUs.
        """


def key(secret: str, *parts: str) -> str:
    """Derive a key for one purpose from a secret, and return it in hexadecimal. The key does not reveal the secret.

    Args:
        secret: a secret that the nodes of a run share.
        parts: what the key is for. Different parts give a different key.
    """
    assert secret, "a launch path has no secret until it is resolved"
    return hashlib.sha256(" ".join((secret, *parts)).encode()).hexdigest()
