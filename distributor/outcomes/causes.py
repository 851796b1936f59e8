"""Why a run was stopped before its ranks had ended by themselves. Values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distributor.outcomes.stacks import Stacks
from distributor.text.wording import no_temporary_folder
from distributor.values.job import Step
from distributor.values.outcome import Failure


@dataclass(frozen=True)
class Cancelled:
    """The run was cancelled. ``why`` says so in words if it was not the user; otherwise it is ``""``."""

    why: str = ""


@dataclass(frozen=True)
class Stalled:
    """No rank did anything for ``limit`` seconds; ``stacks`` says where the ranks were."""

    limit: float
    stacks: Stacks

    @property
    def message(self) -> str:
        """The text of the error."""
        return f"no rank wrote anything or used CPU time for stall_timeout={self.limit:g} s: {self.stacks}"


@dataclass(frozen=True)
class StartTimeout:
    """The ranks were not up within ``limit`` seconds; ``step`` is what the run was doing then."""

    limit: float
    step: Step

    @property
    def message(self) -> str:
        """The text of the error."""
        return f"the run did not start within start_timeout={self.limit:g} s: it was {self.step}"


@dataclass(frozen=True)
class Unfit:
    """The temporary folder of the node on ``host`` cannot be used; ``why`` is a short text."""

    host: str
    why: str

    @property
    def message(self) -> str:
        """The text of the error."""
        return no_temporary_folder(self.host, self.why)


@dataclass(frozen=True)
class RankFailed:
    """A rank failed. ``failures`` were reported while the run went on; others may be reported only at its end."""

    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class NodeLost:
    """Nodes were lost. ``nodes`` describes each as text; ``failures`` of ranks may be its causes or consequences."""

    nodes: tuple[str, ...]
    failures: tuple[Failure, ...] = ()


Cause = Cancelled | Stalled | StartTimeout | Unfit | RankFailed | NodeLost


def joined(first: Cause, then: Cause) -> Cause:
    """Return the cause of a stop that began because of ``first``, after ``then`` has been reported too.

    A run that was cancelled, stalls or does not start keeps its cause. Failed ranks and lost nodes are both kept, since
    it is chance which of them the driver hears of first.

    >>> joined(RankFailed(), NodeLost(("host-b",)))
    NodeLost(nodes=('host-b',), failures=())
    """
    if not isinstance(first, (RankFailed, NodeLost)) or not isinstance(then, (RankFailed, NodeLost)):
        return first
    known = {failure.rank for failure in first.failures}
    failures = (*first.failures, *(failure for failure in then.failures if failure.rank not in known))
    nodes = tuple(name for cause in (first, then) if isinstance(cause, NodeLost) for name in cause.nodes)
    return NodeLost(nodes, failures) if nodes else replace(first, failures=failures)
