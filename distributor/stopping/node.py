"""The agent's part in stopping all ranks of a run at the same step, through the vote file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from distributor.stopping.vote_file import NONE, Vote, VoteFile
from distributor.values import messages
from distributor.values.messages import Message

_LOOK = 0.1  # seconds between two reads of the vote file

_BUSY = 0.005  # seconds until the next try, if a rank has locked the vote file


class NodeStop:
    """The node's part in the agreement. ``tell`` is for messages that must reach the driver, ``send`` for others."""

    def __init__(
        self,
        vote_file: VoteFile,
        first_rank: int,
        attempt: int,
        tell: Callable[[Message], None],
        send: Callable[[Message], None],
    ) -> None:
        self._vote_file = vote_file
        self._first_rank = first_rank
        self._attempt = attempt
        self._tell = tell
        self._send = send
        self._number = 0
        self._reported: set[Message] = set()

    def on_order(self, order: messages.Propose | messages.Agree) -> None:
        """Obey the driver's order, which may arrive twice, or after its attempt has ended."""
        if order.attempt == self._attempt:
            self._write(partial(self._answer, order))

    def agree_alone(self) -> None:
        """Stop the ranks at the next step, without the driver. This node must have all ranks of the run."""
        self._write(self._decide)

    def _write(self, write: Callable[[], Message | None]) -> None:
        """Call ``write`` as soon as no rank has locked the vote file, and send the driver what it returns."""
        try:
            with self._vote_file.locked(wait=False):
                answer = write()
        except BlockingIOError:
            asyncio.get_running_loop().call_later(_BUSY, self._write, write)
            return
        except OSError:  # the folder is gone, because the node is ending
            return
        if answer is not None:
            self._send(answer)

    def _decide(self) -> None:
        step = self._vote_file.head().proposed
        if step == NONE:
            step = self._highest() + 1
            self._vote_file.propose(step)
        self._vote_file.agree(step)

    def _highest(self) -> int:
        return max((seat.step for seat in self._vote_file.seats()), default=NONE)

    def _answer(self, order: messages.Propose | messages.Agree) -> messages.Reached | None:
        """Write the driver's order to the vote file, which must be locked. Return an answer if one is due."""
        if order.number < self._number:
            return None
        self._number = order.number
        head = self._vote_file.head()
        if isinstance(order, messages.Agree):
            if head.proposed == order.step:
                self._vote_file.agree(order.step)
            return None
        highest = self._highest()
        accepted = highest < order.step or head.proposed == order.step
        if accepted:
            self._vote_file.propose(order.step)
        return messages.Reached(order.number, accepted, highest, attempt=self._attempt)

    async def follow(self) -> None:
        """Report to the driver, until cancelled, which ranks got SIGTERM from others and at which step each stopped."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK)

    def look(self) -> None:
        """Read the vote file once, and report to the driver what is new there."""
        for rank, seat in enumerate(self._seats(), start=self._first_rank):
            if seat.preempted:
                self._tell_once(messages.RankPreempted(rank, attempt=self._attempt))
            if seat.halted != NONE:
                self._tell_once(messages.Halted(rank, seat.halted, attempt=self._attempt))

    def _seats(self) -> list[Vote]:
        """Return the ranks' entries; none if the node is ending, and its folder gone."""
        with suppress(OSError):
            return self._vote_file.seats()
        return []

    def _tell_once(self, message: Message) -> None:
        if message not in self._reported:
            self._reported.add(message)
            self._tell(message)

    @property
    def asks(self) -> bool:
        """Whether a rank of the node has called ``should_stop``."""
        return any(seat.step != NONE for seat in self._seats())

    @property
    def begun(self) -> bool:
        """Whether the driver has proposed a step at which all ranks stop, or will, since a rank got SIGTERM."""
        with suppress(OSError):
            return self._vote_file.head().proposed != NONE or any(seat.preempted for seat in self._seats())
        return False

    def stop(self, alive: Mapping[int, int]) -> dict[int, int]:
        """Tell the ranks that they are being stopped. Return which of ``alive`` the caller may kill at once.

        There, this package handles SIGTERM and user code does not: without our handler, SIGTERM would end them.
        """
        with suppress(OSError):
            self._vote_file.end()
        handling = {local_rank for local_rank, seat in enumerate(self._seats()) if seat.handles}
        return {local_rank: pid for local_rank, pid in alive.items() if local_rank in handling}

    def close(self) -> None:
        self._vote_file.close()

    def halted(self) -> dict[int, int]:
        return {local_rank: seat.halted for local_rank, seat in enumerate(self._seats()) if seat.halted != NONE}
