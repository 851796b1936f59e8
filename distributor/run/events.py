"""The events that happen to an attempt, and the actions that the attempt's state requests, as plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from distributor.outcomes.stacks import Stacks
from distributor.values.job import Status, Step
from distributor.values.messages import Message
from distributor.values.outcome import Collected


class Deadline(enum.Enum):
    """A kind of deadline. The value of each member says in words what is checked when such a deadline passes."""

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
    """A node has died or cannot be reached; ``why`` says which. ``wrote`` has the last line that each rank wrote."""

    node: str
    why: str
    wrote: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """The run must end. ``why`` is shown in the live status.

    ``told`` is the reason that the text of the run's ``RunCancelledError`` gives; ``""`` if the user has cancelled the
    run.
    """

    why: str
    told: str = ""


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


@dataclass(frozen=True)
class Asked:
    """The scheduler has been asked what the job is waiting for, such as free slots, and has answered.

    Attributes:
        deadline: the deadline that had passed, which is why the scheduler was asked.
        step: what the job waits for; ``None`` if the job's tasks run, or if the scheduler does not know.
        address: where the driver listens for nodes; ``None`` if it does not listen.
        reached: whether any node, or a Spark task whose node is not up yet, has reached the driver.
    """

    deadline: Deadline
    step: Step | None
    address: str | None
    reached: bool


@dataclass(frozen=True)
class Room:
    """Free slots have been counted. ``ranks`` is how many more ranks the run could have in a new job."""

    ranks: int


@dataclass(frozen=True)
class Leaving:
    """The cluster will soon end the node on ``host``. If ``host`` is ``None``, no node will end soon."""

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
    """Order all nodes to stop their ranks.

    Without ``grace``, nodes kill the ranks at once. With ``hasty``, nodes kill each rank as soon as it is not writing a
    file, because another attempt waits for the end of the ranks.
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
    """End the job through the scheduler, even if the ranks' grace period has not passed."""


@dataclass(frozen=True)
class Arm:
    """Set a deadline. Once ``after`` seconds have passed, the event :class:`Due` is reported."""

    deadline: Deadline
    after: float


@dataclass(frozen=True)
class AskScheduler:
    """Ask the scheduler what the job waits for. The answer comes as an :class:`Asked` event."""

    deadline: Deadline


@dataclass(frozen=True)
class AskRoom:
    """Look for free slots for more ranks. The result comes as a :class:`Room` event."""


@dataclass(frozen=True)
class AskLeaving:
    """Check whether the cluster will soon end a node. The result comes as a :class:`Leaving` event."""


@dataclass(frozen=True)
class AskStacks:
    """Ask all ranks for their stacks. The answers come as one :class:`Stood` event."""


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
    """Now that no node has ranks left, ask the run to decide whether its nodes begin another attempt or end.

    ``port`` is the port on node 0 at which the ranks of the next attempt would meet. It is ``None`` if no attempt can
    follow on these nodes, because a node is lost or could not start its ranks.
    """

    port: int | None


Action = StopRanks | TellNodes | EndJob | Arm | AskScheduler | AskRoom | AskLeaving | AskStacks | Announce | Warn | Rest
