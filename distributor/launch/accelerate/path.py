"""The launch path for Accelerate: ranks start as with torchrun, and also get the variables of ``accelerate launch``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from distributor.launch.torchrun import Torchrun
from distributor.values.launch_path import BasePath
from distributor.values.plan import Plan, Site


@dataclass(frozen=True)
class AccelerateRanks(BasePath):
    """The launch path for Accelerate. Ranks start as with torchrun, and get Accelerate's settings as variables.

    Attributes:
        config: path of Accelerate's configuration file on the driver; "" if there is none.
        variables: names and values of the environment variables that ``accelerate launch`` would set.
    """

    name: ClassVar[str] = "accelerate"
    restarts: ClassVar[bool] = True
    uses_torch: ClassVar[bool] = True
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({"accelerate": "launch=Accelerate()"})

    config: str = ""
    variables: tuple[tuple[str, str], ...] = ()

    def env(self, use_gpu: bool) -> Mapping[str, str]:
        """Return the environment variables that all ranks get. The user's own variables take precedence."""
        return {**Torchrun().env(use_gpu), **dict(self.variables)}

    def plan(self, site: Site) -> Plan:
        """Return the plan of one node: what its ranks run, and in which environment."""
        return Torchrun().plan(site)
