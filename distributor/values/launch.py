"""What a launch path is: a frozen value in the job that says how ranks are started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from distributor.values.plan import Plan, Site


class LaunchPath(Protocol):
    """Decide how a job's ranks are started. A value without effects: it travels in the job."""

    @property
    def name(self) -> str:
        """What users and the dry run call it."""

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules that a warm process imports beside torch."""

    @property
    def needs(self) -> Mapping[str, str]:
        """The modules that ranks import, each with what asks for it."""

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        """Return the variables that must be set before torch is imported."""

    def plan(self, site: Site) -> Plan:
        """Return what one node does."""


class Launch(Protocol):
    """What users pass as ``launch=``."""

    def resolve(self, num_processes: int, use_gpu: bool) -> LaunchPath:
        """Return the launch path; may read files on the driver.

        Raises:
            ConfigurationError: the value does not fit the run.
        """
