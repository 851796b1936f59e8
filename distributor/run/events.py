"""What happens to an attempt, and what its state requests, as plain values."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from distributor.outcomes.stacks import Stacks
from distributor.values.job import Status, StatusDetail
from distributor.values.messages import Message
from distributor.values.outcome import Collected


class Deadline(enum.Enum):
    """A kind of deadline. The value says what is checked once it passes."""

    START = "the ranks must be up"
    REACH = "some node should have reached the driver"
    END = "the job must have ended"
    HALT = "the ranks should have stopped together"
    WIDEN = "there may be slots for more ranks"
    LEAVE = "the cluster may soon end a node"
    TERMINATE = "the ranks should have saved and ended"
    BLAME = "a failure that explains a broken connection should have been reported"


# Events.


@dataclass(frozen=True)
class Heard:
    """The driver has received a message from a node, or from a Spark task whose node is not up yet."""

    node: str
    message: Message


@dataclass(frozen=True)
class Lost:
    """A node has died or cannot be reached."""

    node: str
    why: str
    wrote: Mapping[int, str] = field(default_factory=dict)  # the last line of each rank


@dataclass(frozen=True)
class Cancel:
    """The run must end."""

    why: str  # for the live status
    told: str = ""  # for the RunCancelledError; "" if the user has cancelled


@dataclass(frozen=True)
class Kill:
    """The user wants the run to end at once, without a grace period."""


@dataclass(frozen=True)
class Halt:
    """The user wants the ranks to save, stop together, and return."""


@dataclass(frozen=True)
class DriverTerminated:
    """The run must end within the grace period, since its driver got SIGTERM. Ranks may save first."""


@dataclass(frozen=True)
class Due:
    """A deadline has passed."""

    deadline: Deadline
    quiet: float = math.inf  # seconds for which no output of ranks has arrived


@dataclass(frozen=True)
class Asked:
    """The scheduler has said what the job waits for, such as free slots."""

    deadline: Deadline  # why it was asked
    step: StatusDetail | None  # None if tasks run, or if unknown
    address: str | None  # where the driver listens, if it does
    reached: bool  # a node, or a Spark task whose node is not up yet, has reached the driver


@dataclass(frozen=True)
class Room:
    """Free slots have been counted."""

    ranks: int  # how many more a new job could have


@dataclass(frozen=True)
class Leaving:
    """The cluster will soon end a node, or none."""

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


Event = (
    Heard | Lost | Cancel | Kill | Halt | DriverTerminated | Due | Asked | Room | Leaving | Stood | Returned | JobEnded
)


# Actions.


@dataclass(frozen=True)
class StopRanks:
    """Order all nodes to stop their ranks."""

    reason: str
    grace: bool = True  # without it, kill them at once
    hasty: bool = False  # kill each as soon as it writes no file: another attempt waits


@dataclass(frozen=True)
class TellNodes:
    """Send an order to all nodes that are connected now."""

    order: Message


@dataclass(frozen=True)
class EndJob:
    """End the job through the scheduler, even if the ranks' grace period has not passed."""


@dataclass(frozen=True)
class Arm:
    """Set a deadline: :class:`Due` follows after ``after`` seconds."""

    deadline: Deadline
    after: float


@dataclass(frozen=True)
class AskScheduler:
    """Ask the scheduler what the job waits for: :class:`Asked`."""

    deadline: Deadline


@dataclass(frozen=True)
class AskRoom:
    """Look for free slots for more ranks: :class:`Room`."""


@dataclass(frozen=True)
class AskLeaving:
    """Check whether the cluster will soon end a node: :class:`Leaving`."""


@dataclass(frozen=True)
class AskStacks:
    """Ask all ranks for their stacks: one :class:`Stood`."""


@dataclass(frozen=True)
class Announce:
    """Show the user which ranks run where."""

    text: str


@dataclass(frozen=True)
class Warn:
    """Log a warning."""

    text: str


@dataclass(frozen=True)
class AtRest:
    """No node has ranks left: decide whether the nodes begin another attempt or end."""

    port: int | None  # where another attempt would meet, on node 0; None if a node is lost or could not start


Action = (
    StopRanks | TellNodes | EndJob | Arm | AskScheduler | AskRoom | AskLeaving | AskStacks | Announce | Warn | AtRest
)
