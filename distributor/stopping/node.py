"""The agent's part in stopping all ranks of a run at the same step; see :mod:`distributor.stopping.rank`.

A node's ranks and its agent share a small file, the *board*, through which they agree on the training step at which all
ranks stop; see :mod:`distributor.stopping.board`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from distributor.stopping.board import NONE, Board, Seat
from distributor.values import messages
from distributor.values.messages import Message

#: Number of seconds between two reads of the board, the file that ranks and agent share.
_LOOK = 0.1

#: Number of seconds until the next try, if a rank has locked the board (the file that ranks and agent share).
_BUSY = 0.005


class Halting:
    """The node's part in the agreement on the training step at which all ranks of a run stop.

    Args:
        board: the file that the node's ranks and the agent share.
        first_rank: global rank of local rank 0.
        attempt: number of the attempt.
        tell: sends a message that must reach the driver.
        send: sends a message that may get lost.
    """

    def __init__(
        self,
        board: Board,
        first_rank: int,
        attempt: int,
        tell: Callable[[Message], None],
        send: Callable[[Message], None],
    ) -> None:
        self._board = board
        self._first_rank = first_rank
        self._attempt = attempt
        self._tell = tell
        self._send = send
        self._number = 0
        self._told: set[Message] = set()

    def on_order(self, order: messages.Propose | messages.Agree) -> None:
        """Obey an order from the driver.

        An order may arrive twice, or after its attempt has ended. Orders for other attempts are ignored.
        """
        if order.attempt == self._attempt:
            self._write(partial(self._answer, order))

    def agree_alone(self) -> None:
        """Stop the ranks at the next step, without the driver. This node must have all ranks of the run."""
        self._write(self._decide)

    def _write(self, write: Callable[[], Message | None]) -> None:
        """Call ``write`` as soon as no rank has locked the board, and send the driver what it returns."""
        try:
            with self._board.locked(wait=False):
                answer = write()
        except BlockingIOError:
            asyncio.get_running_loop().call_later(_BUSY, self._write, write)
            return
        except OSError:  # the folder is gone, because the node is ending
            return
        if answer is not None:
            self._send(answer)

    def _decide(self) -> None:
        step = self._board.head().proposed
        if step == NONE:
            step = self._highest() + 1
            self._board.propose(step)
        self._board.agree(step)

    def _highest(self) -> int:
        return max((seat.step for seat in self._board.seats()), default=NONE)

    def _answer(self, order: messages.Propose | messages.Agree) -> messages.Reached | None:
        """Write the driver's order to the board (the file shared with the ranks). Return an answer if one is due.

        The caller must lock the board's file before the call, and send the returned answer to the driver afterwards.
        """
        if order.number < self._number:
            return None
        self._number = order.number
        head = self._board.head()
        if isinstance(order, messages.Agree):
            if head.proposed == order.step:
                self._board.agree(order.step)
            return None
        highest = self._highest()
        accepted = highest < order.step or head.proposed == order.step
        if accepted:
            self._board.propose(order.step)
        return messages.Reached(order.number, accepted, highest)

    async def follow(self) -> None:
        """Report to the driver, until cancelled, which ranks got SIGTERM from others and at which step each stopped."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK)

    def look(self) -> None:
        """Read the board (the file that ranks and agent share) once, and report to the driver what is new there."""
        for rank, seat in enumerate(self._seats(), start=self._first_rank):
            if seat.preempted:
                self._tell_once(messages.Preempted(rank))
            if seat.halted != NONE:
                self._tell_once(messages.Halted(rank, seat.halted))

    def _seats(self) -> list[Seat]:
        """Return the ranks' entries on the board, the file that the ranks share with the agent.

        If the node is ending, its folder may be gone, including the board. In that case, return an empty list.
        """
        with suppress(OSError):
            return self._board.seats()
        return []

    def _tell_once(self, message: Message) -> None:
        if message not in self._told:
            self._told.add(message)
            self._tell(message)

    @property
    def asks(self) -> bool:
        """Whether a rank of the node has called ``should_stop``."""
        return any(seat.step != NONE for seat in self._seats())

    @property
    def begun(self) -> bool:
        """Whether the driver has proposed a step at which all ranks stop, or will, since a rank got SIGTERM."""
        with suppress(OSError):
            return self._board.head().proposed != NONE or any(seat.preempted for seat in self._seats())
        return False

    def stop(self, alive: Mapping[int, int]) -> dict[int, int]:
        """Tell the ranks that they are being stopped, through the board (the file that ranks and agent share).

        Args:
            alive: pids of the living ranks, by local rank.

        Returns:
            The pids, by local rank, of the living ranks in which this package handles SIGTERM and user code does not.
            The caller may kill these ranks at once, as SIGTERM would do without this package's handler.
        """
        with suppress(OSError):
            self._board.end()
        handling = {local_rank for local_rank, seat in enumerate(self._seats()) if seat.handles}
        return {local_rank: pid for local_rank, pid in alive.items() if local_rank in handling}

    def close(self) -> None:
        """Close the board, the file that the ranks share with the agent."""
        self._board.close()

    def halted(self) -> dict[int, int]:
        """Return the training step at which each rank has stopped, by local rank."""
        return {local_rank: seat.halted for local_rank, seat in enumerate(self._seats()) if seat.halted != NONE}
