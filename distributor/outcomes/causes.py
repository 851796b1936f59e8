"""Why the driver stops a run before all ranks have ended by themselves, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distributor.outcomes.stacks import Stacks
from distributor.text.wording import no_temporary_folder, who
from distributor.values.job import StatusDetail
from distributor.values.outcome import Failure


@dataclass(frozen=True)
class Cancelled:
    """The run was cancelled. ``why`` is ``""`` if the user has done it."""

    why: str = ""


@dataclass(frozen=True)
class Stalled:
    """No rank did anything for ``limit`` seconds; ``stacks`` says which code the ranks were in."""

    limit: float
    stacks: Stacks

    @property
    def message(self) -> str:
        return f"no rank wrote anything or used CPU time for stall_timeout={self.limit:g} s: {self.stacks}"


@dataclass(frozen=True)
class StartTimeout:
    """The ranks were not up within ``limit`` seconds; ``step`` is what the run was doing then."""

    limit: float
    step: StatusDetail

    @property
    def message(self) -> str:
        return f"the run did not start within start_timeout={self.limit:g} s: it was {self.step}"


@dataclass(frozen=True)
class Unfit:
    """The temporary folder of the node on ``host`` cannot be used."""

    host: str
    why: str

    @property
    def message(self) -> str:
        return no_temporary_folder(self.host, self.why)


@dataclass(frozen=True)
class RankFailed:
    """A rank failed. Other failures than these may be reported only at the end of the run."""

    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class NodeLost:
    """Nodes were lost; ``failures`` of ranks may have caused or followed this."""

    nodes: tuple[str, ...]  # each in words
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Preempted:
    """All ranks were asked to stop together, although the training had not finished."""

    why: str
    kept: str  # a sentence about the run's last checkpoint
    widens: bool = False  # the run goes on with more ranks

    def message(self, step: int) -> str:
        if self.widens:
            return f"{self.why}, so all ranks have stopped at step {step}. {self.kept}"
        return f"the run was preempted: {self.why}, and all ranks have stopped at step {step}. {self.kept}"


@dataclass(frozen=True)
class Disagreed:
    """Ranks should have stopped together, but stopped at different steps; ``message`` names the steps."""

    message: str


Cause = Cancelled | Stalled | Disagreed | StartTimeout | Unfit | RankFailed | NodeLost


def joined(first: Cause, then: Cause) -> Cause:
    """Return the cause to report if ``then`` is reported while a run is being stopped because of ``first``.

    Failed ranks and lost nodes are combined, because their reports may arrive in any order. Otherwise, ``first`` stays.
    The failures of ``then`` must be of other ranks.

    >>> joined(RankFailed(), NodeLost(("host-b",)))
    NodeLost(nodes=('host-b',), failures=())
    """
    if not isinstance(first, (RankFailed, NodeLost)) or not isinstance(then, (RankFailed, NodeLost)):
        return first
    failures = (*first.failures, *then.failures)
    nodes = tuple(name for cause in (first, then) if isinstance(cause, NodeLost) for name in cause.nodes)
    return NodeLost(nodes, failures) if nodes else replace(first, failures=failures)


def disagreement(halted: Mapping[int, int]) -> str | None:
    """Return an error text if ranks, by the steps at which they stopped, have not stopped together.

    >>> disagreement({0: 7, 1: 7})
    >>> disagreement({0: 7, 1: 8, 2: 8})
    'rank 0 was told to stop at step 7, and ranks 1-2 at step 8: call should_stop() with the same steps on all ranks'
    """
    steps = sorted({*halted.values()})
    if len(steps) < 2:
        return None
    first, last = ([rank for rank, step in sorted(halted.items()) if step == at] for at in (steps[0], steps[-1]))
    return (
        f"{who(first)} {'was' if len(first) == 1 else 'were'} told to stop at step {steps[0]}, and {who(last)} at step "
        f"{steps[-1]}: call should_stop() with the same steps on all ranks"
    )
