"""The launcher's main thread: starts, watches and stops a node's ranks, and never waits for the network.

Process descriptors show at once that a rank exits, and its true exit code.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distributor.machine import bootstrap, limits
from distributor.machine.processes import die_with_parent, pidfd_open, readable
from distributor.node import launchers, rank_exits
from distributor.rank import process
from distributor.values import layout, messages
from distributor.values.plan import NodeOrder

#: Signals at which the launcher stops its ranks.
_ORDERS = (layout.STOP_SIGNAL, layout.FAST_KILL_SIGNAL)

HANDLED = (*_ORDERS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # at the others, the agent decides what to do

#: Seconds before ranks are stopped after a failure: for the failure that explains a broken connection or, with a spare,
#: for the agent's order, which says whether another attempt follows.
_PATIENCE = 1.0

_TELL_PATIENCE = 1.0  # seconds for torch's thread to tell other nodes of a failure, once no rank is left

_IDLE = 3600.0  # seconds of a wait without a deadline


@dataclass
class _Rank:
    """A rank's process."""

    local_rank: int
    pid: int
    pidfd: int
    succeeded: bool | None = None  # None while it runs
    echoes: bool = False  # failed because another was lost
    stopped: float | None = None  # when the launcher began to stop it
    released: float | None = None  # when nobody needed its service any more; it then counts as succeeded


@dataclass
class _Wishes:
    """What other threads and signal handlers ask of the main thread."""

    pipe: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
    begin: bool = False  # let the ranks begin
    release: bool = False  # end ranks that only serve others, such as parameter servers
    stop: bool = False
    ordered: bool = False  # the agent wants the stop, not torch's thread
    fast_kill: bool = False  # the agent ends the ranks itself: send no SIGTERM
    terminated: bool = False  # the launcher itself got SIGTERM
    over: threading.Event = field(default_factory=threading.Event)  # Watch.run returns

    def wake(self) -> None:
        try:
            os.write(self.pipe[1], b"x")
        except BlockingIOError:  # the pipe is full, so the main thread wakes anyway
            pass


class RankSupervisor:
    """Starts, watches and stops the ranks of a node."""

    def __init__(self, order: NodeOrder, tell: Callable[[messages.Message], None]) -> None:
        self._order = order
        self._tell = tell
        self._ranks: list[_Rank] = []
        self._gate: int | None = None  # write end of the pipe on which forked ranks wait until they may begin
        self._begun = False
        self._told = False
        self._end: float | None = None  # end of the grace period, once ranks have been told to stop
        self._held: float | None = None  # end of the wait for the agent's order
        self._wishes = _Wishes()
        self._files = limits.open_files()  # the limit on open files that ranks get
        self._changed = threading.Condition()

    def raise_limits(self) -> None:
        """Let this process open as many files as ranks and the store need, up to its hard limit."""
        limits.raise_open_files(launchers.files_needed(self._order.placement))

    def handle_signals(self) -> None:
        """Handle the signals :data:`HANDLED`. The handler only sets flags, as it may interrupt any code."""
        signal.set_wakeup_fd(self._wishes.pipe[1], warn_on_full_buffer=False)
        for number in HANDLED:
            signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, _: Any) -> None:
        if number not in _ORDERS:
            self._wishes.terminated = True
            return
        self._wishes.fast_kill = self._wishes.fast_kill or number == layout.FAST_KILL_SIGNAL
        self._wishes.stop = self._wishes.ordered = True

    def fork_ranks(self) -> None:
        """Fork the ranks, which then wait until they may begin, unless they are new processes.

        This must precede other threads and the store, whose C++ thread sometimes holds locks of libc, as it looks names
        up. A process forked at such a moment would wait for the lock forever.
        """
        if self._order.start_method != "fork":
            return
        gc.collect()
        gc.freeze()  # keeps existing objects shared between the ranks: the collector does not write to their pages
        sys.stdout.flush()
        sys.stderr.flush()
        waiting, self._gate = os.pipe()
        for local_rank in range(self._order.plan.node.local_world_size):
            self._start(local_rank, partial(self._fork, local_rank, waiting))
        os.close(waiting)

    def run(self) -> None:
        """Watch the ranks until :meth:`end`, or all have been stopped.

        In that case, torch's thread first gets :data:`_TELL_PATIENCE` seconds to tell the other nodes.
        """
        while not self._wishes.over.is_set():
            self._look()
            if self._wishes.terminated:
                self._wishes.terminated = False
                self._tell(messages.Terminated())
            if self._wishes.begin and not self._begun:
                self._begin()
            if self._wishes.release and self._running():
                self._release()
            if self._wishes.stop or self._failed:
                self._stop()
                if not self._running():
                    if self._begun:  # otherwise the other thread has no store yet to tell other nodes
                        self._wishes.over.wait(_TELL_PATIENCE)
                    return

    # The thread of torch's elastic agent calls the following methods.

    def begin(self) -> dict[int, int]:
        """Let the ranks begin, and return their pids by local rank."""
        self._wishes.begin = True
        self._wishes.wake()
        with self._changed:
            self._changed.wait_for(lambda: self._begun)
        return {rank.local_rank: rank.pid for rank in self._ranks}

    def await_end(self, timeout: float, *, known: bool = False) -> Mapping[int, bool | None]:
        """Wait until a stop begins, as after a failure, or all ranks but serving ones have ended, or for ``timeout`` s.

        Return whether each rank has succeeded, ``None`` while it runs. If the end is ``known``, wait for a stop only. A
        serving rank, such as a parameter server, runs until :meth:`release`.
        """
        with self._changed:
            serving = self._order.plan.serving_here
            self._changed.wait_for(lambda: self.stopping or not (known or self._running(serving)), timeout)
            return {rank.local_rank: rank.succeeded for rank in self._ranks}

    @property
    def stopping(self) -> bool:
        """Whether a stop has been requested or has begun."""
        return self._wishes.stop or self._end is not None

    def stop(self) -> None:
        """Stop the ranks, and return once all have ended."""
        self._wishes.stop = True
        self._wishes.wake()
        with self._changed:
            self._changed.wait_for(lambda: not self._running())

    def release(self) -> None:
        """End serving ranks, and return once they have ended. They count as succeeded."""
        if self._running():
            self._wishes.release = True
            self._wishes.wake()
        with self._changed:
            self._changed.wait_for(lambda: not self._running())

    def end(self) -> None:
        """Make :meth:`run` return."""
        self._wishes.over.set()
        self._wishes.wake()

    # The following methods run in the main thread.

    def _begin(self) -> None:
        for local_rank in range(len(self._ranks), self._order.plan.node.local_world_size):
            self._start(local_rank, partial(self._spawn, local_rank))
        self._tell_started()  # before any rank begins: the agent must know all ranks that it may stop
        if self._gate is not None:
            os.write(self._gate, b"x" * len(self._ranks))
            os.close(self._gate)
            self._gate = None
        with self._changed:
            self._begun = True
            self._changed.notify_all()

    def _tell_started(self) -> None:
        if not self._told:
            self._told = True
            self._tell(messages.RanksStarted(tuple(rank.pid for rank in self._ranks), time.time()))

    def _start(self, local_rank: int, start: Callable[[], int]) -> None:
        # Until a forked rank resets its signal handlers, it has those of the launcher, which would only set a flag.
        # Blocked signals are not lost: they reach the rank later.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = start()
            limits.set_open_files(pid, self._files)
            self._ranks.append(_Rank(local_rank, pid, pidfd_open(pid)))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def _fork(self, local_rank: int, waiting: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            die_with_parent(parent)
            for rank in self._ranks:
                os.close(rank.pidfd)
            let_go = os.read(waiting, 1)
            if self._gate is None or not let_go:
                os._exit(1)
            for descriptor in (waiting, self._gate, *self._wishes.pipe, self._order.event_fd):
                os.close(descriptor)
            process.become(self._order, local_rank, parent)
        return pid

    def _spawn(self, local_rank: int) -> int:
        path, slots = str(layout.order(self._order.folder)), self._order.slots_fd
        command = bootstrap.command(self._order.root, "rank", path, str(local_rank), str(os.getpid()), str(slots))
        environ = {**self._order.environ, **self._order.plan.rank_env[local_rank]}
        os.set_inheritable(slots, True)
        try:
            return os.posix_spawn(sys.executable, command, environ)
        finally:
            os.set_inheritable(slots, False)

    def _look(self) -> None:
        """Wait until a rank exits, a request arrives or a time limit is over, and reap ranks that have exited."""
        running = {rank.pidfd: rank for rank in self._running()}
        for descriptor in readable([*running, self._wishes.pipe[0]], self._patience()):
            if descriptor in running:
                self._reap(running[descriptor])
            else:
                os.read(descriptor, 1 << 16)

    def _patience(self) -> float:
        next_look = self._held if self._end is None else self._end
        return _IDLE if next_look is None else max(0.0, next_look - time.monotonic())

    def _reap(self, rank: _Rank) -> None:
        _, status = os.waitpid(rank.pid, 0)
        os.close(rank.pidfd)
        code, now = os.waitstatus_to_exitcode(status), time.monotonic()
        self._tell_started()  # needed here too, since a rank may be killed before it begins
        code = code if rank.released is None else 0
        ending = rank_exits.read(self._order.slots_fd, rank.local_rank)
        early = code == 0 and rank.released is None and rank_exits.leaves_early(self._order.plan.target, ending)
        exited = messages.RankExited(rank.local_rank, code, rank.stopped, now, rank.released, early)
        self._tell(exited)
        with self._changed:
            rank.succeeded = exited.succeeded
            rank.echoes = code >= 0 and rank_exits.echoes(ending)
            self._changed.notify_all()

    def _stop(self) -> None:
        """Send the ranks SIGTERM at the first call, and SIGKILL at the first call after the grace period.

        SIGTERM may have to wait, see :meth:`_waits`, and is not sent if the agent ends the ranks. Before the rendezvous
        of all nodes, ranks have run no user code and get no grace period.
        """
        if self._end is None:
            if self._waits():
                return
            self._signal_running(None if self._wishes.fast_kill else signal.SIGTERM)
            self._end = time.monotonic() + (self._order.grace_period if self._begun else 0.0)
            with self._changed:
                self._changed.notify_all()
        elif time.monotonic() >= self._end:
            self._end += _IDLE
            self._signal_running(signal.SIGKILL)

    def _waits(self) -> bool:
        """Return whether to wait before ranks get SIGTERM, for :data:`_PATIENCE` seconds at most.

        If another attempt follows, the agent sends a signal, and kills the ranks itself. If ranks have only lost their
        connections to another, SIGTERM would hide how that one ends.
        """
        if self._wishes.ordered or not self._begun or self._wishes.release:
            return False
        failed = [rank for rank in self._ranks if rank.succeeded is False]
        if self._order.spare_fd is None and not (failed and all(rank.echoes for rank in failed)):
            return False
        self._held = time.monotonic() + _PATIENCE if self._held is None else self._held
        return time.monotonic() < self._held

    def _release(self) -> None:
        now = time.monotonic()
        for rank in self._running():
            rank.released = now if rank.released is None else rank.released
        self._stop()

    @property
    def _failed(self) -> bool:
        return any(rank.succeeded is False for rank in self._ranks)

    def _running(self, left_out: Collection[int] = ()) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.succeeded is None and rank.local_rank not in left_out]

    def _signal_running(self, number: signal.Signals | None) -> None:
        """Note that the launcher begins to stop the running ranks, and send them a signal, if any."""
        for rank in self._running():
            if rank.stopped is None and rank.released is None:
                rank.stopped = time.monotonic()
            if number is not None:
                os.kill(rank.pid, number)
