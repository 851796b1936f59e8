"""What an agent knows about the ranks of its node."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass, field, replace

from distributor.channel import rank_slots
from distributor.channel.rank_slots import RankSlots
from distributor.machine import limits, processes
from distributor.machine.shared_memory import Segments
from distributor.node import rank_exits
from distributor.node.launchers import Launcher
from distributor.stopping.node import NodeStop
from distributor.values import layout, messages
from distributor.values.plan import NodeOrder

#: Matches a traceback from the imports of ``launcher.py`` on, without source lines, which are missing in a zip file.
_IMPORTS_TORCH = re.compile(r'distributor/node/launcher\.py", line \d+, in <module>\n.*', re.DOTALL)


@dataclass
class Ranks:
    """What the launcher has reported about the ranks."""

    slots: RankSlots
    node_stop: NodeStop
    segments: Segments = field(default_factory=Segments)  # files in /dev/shm of libraries, removed after the attempt
    started: bool = False
    exits: dict[int, messages.RankExited] = field(default_factory=dict)  # by local rank
    pids: dict[int, int] = field(default_factory=dict)  # by local rank
    hurried: set[int] = field(default_factory=set)  # killed by the agent, which makes their failure a stop
    passed: bool = False  # the ranks of all nodes have succeeded
    error: messages.LauncherFailed | None = None

    def note(self, event: messages.Message) -> messages.Message:
        """Record a message of the launcher, and return it.

        The launcher may report the end of a rank that the agent has killed as a failure: it becomes a stop.
        """
        if isinstance(event, messages.RankExited) and event.stopped is None and event.local_rank in self.hurried:
            event = replace(event, stopped=event.moment) if event.code == -signal.SIGKILL else event
        if isinstance(event, messages.RanksStarted):
            self.started, self.pids = True, dict(enumerate(event.pids))
        elif isinstance(event, messages.RankExited):
            self.exits[event.local_rank] = event
        elif isinstance(event, messages.AllPassed):
            self.passed = True
        elif isinstance(event, messages.LauncherFailed):
            self.error = event
        return event

    @property
    def alive_pids(self) -> dict[int, int]:
        return {local_rank: pid for local_rank, pid in self.pids.items() if local_rank not in self.exits}

    def tells(self, local_rank: int) -> bool:
        """Whether a rank is telling which exception it has raised. It ends soon after."""
        said = rank_slots.read(self.slots.descriptor, local_rank)
        return said is not None and (not said or rank_exits.parse(said).known != "all")

    @property
    def failed(self) -> bool:
        """Whether a rank has failed by itself, not because it was stopped."""
        return any(not exit.succeeded and exit.stopped is None for exit in self.exits.values())

    @property
    def succeeded(self) -> bool:
        """Whether there are ranks, and all have succeeded without being stopped."""
        ends = self.exits.values()
        return bool(self.pids) and not self.alive and all(exit.succeeded and exit.stopped is None for exit in ends)

    @property
    def alive(self) -> bool:
        return bool(self.alive_pids)

    def start_error(self, launcher: Launcher, order: NodeOrder, stopping: bool) -> tuple[str, str] | None:
        """Return kind and message of a failure of the launcher; ``None`` if it has not failed.

        It has failed if it says so, if it ended before any rank was started or, on a node without ranks, with a code
        other than 0. An end while the agent was stopping it is no failure.
        """
        if self.error is not None:
            return (
                "StartError",
                f"the launcher on {order.host} failed: {self.error.message}\n\n{self.error.traceback}",
            )
        code = launcher.returncode or 0
        ended = f"was killed by {processes.signal_name(-code)}" if code < 0 else f"ended with code {code}"
        if self.started and not stopping and not order.plan.node.ranks and code != 0:
            return "NodeLostError", f"lost the node on {order.host}: its launcher {ended}"
        if self.started or stopping:
            return None
        said = layout.launcher_log(order.folder).read_text(errors="replace").strip()
        if (why := _without_torch(said)) is not None:
            return "StartError", (
                f"torch cannot be imported on {order.host} by {sys.executable} ({why}): install it there, or choose "
                "another Python before the session starts (the environment variable PYSPARK_PYTHON, or "
                "spark.pyspark.python)"
            )
        limit = limits.little_address_space(limits.here())
        why = "" if limit is None else f": the node {limit}"
        return "StartError", f"the launcher on {order.host} {ended}, before any rank was up{why}\n{said}".rstrip()


def _without_torch(said: str) -> str | None:
    """Return the error if the launcher's log ends with one of importing torch; otherwise ``None``.

    >>> _without_torch('  File "distributor/node/launcher.py", line 26, in <module>\\nImportError: no torch')
    'ImportError: no torch'
    """
    traceback = _IMPORTS_TORCH.search(said)
    last = said.rpartition("\n")[2]
    return last if traceback and "torch" in traceback[0] and re.match(r"\w+Error: ", last) else None
