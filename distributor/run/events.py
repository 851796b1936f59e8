"""Events, which happen to an attempt, and actions, which its state requests. Values without behaviour."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from distributor.outcomes.stacks import Stacks
from distributor.values.job import Status, Step
from distributor.values.messages import Message
from distributor.values.outcome import Collected


class Deadline(enum.Enum):
    """What a deadline is for."""

    START = "the ranks must be up"
    REACH = "a node should have reached the driver"
    END = "the job must have ended"
    HALT = "the ranks should have stopped together"
    WIDEN = "there may be slots for more ranks"
    LEAVE = "a node may be about to be ended"


# Events.


@dataclass(frozen=True)
class Heard:
    """A node has sent a message, or a task has sent one before its node is up."""

    node: str
    message: Message


@dataclass(frozen=True)
class Lost:
    """A node has gone away. ``wrote`` has the last line of each rank that has written a line."""

    node: str
    why: str
    wrote: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """The run must end. ``why`` is shown in the live status.

    ``told`` is the reason in the text of the error; ``""`` if the user has cancelled the run.
    """

    why: str
    told: str = ""


@dataclass(frozen=True)
class Kill:
    """The user wants the run to end at once."""


@dataclass(frozen=True)
class Halt:
    """The user wants the ranks to save, stop together, and return."""


@dataclass(frozen=True)
class Due:
    """A deadline has passed."""

    deadline: Deadline


@dataclass(frozen=True)
class Asked:
    """The scheduler has said what it waits for.

    Attributes:
        deadline: the deadline that has led to the question.
        step: what the scheduler waits for; ``None`` if tasks run.
        address: where the driver listens for nodes; ``None`` if it does not listen.
        reached: whether any node has reached the driver.
    """

    deadline: Deadline
    step: Step | None
    address: str | None
    reached: bool


@dataclass(frozen=True)
class Room:
    """The run's next job could have ``ranks`` more ranks than the current one."""

    ranks: int


@dataclass(frozen=True)
class Leaving:
    """The cluster is about to end the node on ``host``; ``None`` if it is not about to end any node."""

    host: str | None


@dataclass(frozen=True)
class Stood:
    """The ranks of an attempt that seems to stall have reported their stacks."""

    stacks: Stacks


@dataclass(frozen=True)
class Returned:
    """The job has returned the reports of its nodes."""

    collected: Collected


@dataclass(frozen=True)
class JobEnded:
    """The attempt is over: the job has ended, or another attempt follows."""

    status: Status


Event = Heard | Lost | Cancel | Kill | Halt | Due | Asked | Room | Leaving | Stood | Returned | JobEnded


# Actions.


@dataclass(frozen=True)
class StopRanks:
    """Order all nodes to stop their ranks.

    ``hasty``: kill them as soon as they are not writing a file, because another attempt waits for their end.
    """

    reason: str
    grace: bool = True
    hasty: bool = False


@dataclass(frozen=True)
class TellNodes:
    """Send an order to all nodes that are connected now."""

    order: Message


@dataclass(frozen=True)
class EndJob:
    """End the job through the scheduler, without regard for the grace period."""


@dataclass(frozen=True)
class Arm:
    """Report :class:`Due` after a number of seconds."""

    deadline: Deadline
    after: float


@dataclass(frozen=True)
class AskScheduler:
    """Ask the scheduler what it waits for, and report :class:`Asked`."""

    deadline: Deadline


@dataclass(frozen=True)
class AskRoom:
    """Look for free slots, and report :class:`Room`."""


@dataclass(frozen=True)
class AskLeaving:
    """Look whether the cluster is about to end a node, and report :class:`Leaving`."""


@dataclass(frozen=True)
class AskStacks:
    """Ask all ranks for their stacks, and report :class:`Stood`."""


@dataclass(frozen=True)
class Announce:
    """Show the user which ranks run where."""

    text: str


@dataclass(frozen=True)
class Warn:
    """Log a warning."""

    text: str


@dataclass(frozen=True)
class Rest:
    """All nodes have stopped their ranks, and can begin another attempt or end.

    ``port`` is the port at which ranks would meet on node 0 in the next attempt. ``None``: no attempt can follow on
    these nodes, because a node is lost or could not start its ranks.
    """

    port: int | None


Action = StopRanks | TellNodes | EndJob | Arm | AskScheduler | AskRoom | AskLeaving | AskStacks | Announce | Warn | Rest
