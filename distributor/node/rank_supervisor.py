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
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributor.machine import bootstrap, limits
from distributor.machine.processes import die_with_parent, pidfd_open, readable
from distributor.node import launchers, rank_exits
from distributor.node.rank_state import (
    Action,
    BeginRanks,
    Event,
    OpenGate,
    ProcessExited,
    RankState,
    ReleaseRequested,
    SignalRanks,
    SigtermReceived,
    SpawnRanks,
    StopRequested,
    TellAgent,
    TellStarted,
    TimePassed,
)
from distributor.rank import process
from distributor.values import layout, messages
from distributor.values.plan import NodeOrder

#: Signals at which the launcher stops its ranks.
_ORDERS = (layout.STOP_SIGNAL, layout.FAST_KILL_SIGNAL)

HANDLED = (*_ORDERS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # at the others, the agent decides what to do

_TELL_PATIENCE = 1.0  # seconds for torch's thread to tell other nodes of a failure, once no rank is left

_IDLE = 3600.0  # seconds of a wait without a deadline


@dataclass(frozen=True)
class _Process:
    """A rank's process."""

    pid: int
    pidfd: int


class RankSupervisor:
    """Starts, watches and stops the ranks of a node."""

    def __init__(self, order: NodeOrder, tell: Callable[[messages.Message], None]) -> None:
        self._order = order
        self._tell = tell
        self._state = RankState(order.grace_period, spare=order.spare_fd is not None)
        self._processes: list[_Process] = []  # by local rank
        self._gate: int | None = None  # write end of the pipe on which forked ranks wait until they may begin
        #: What other threads and signal handlers ask of the main thread, and the pipe that wakes it.
        self._asked: deque[Event] = deque()
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._over = threading.Event()  # run() returns
        self._files = limits.open_files()  # the limit on open files that ranks get
        self._changed = threading.Condition()  # of the state

    def raise_limits(self) -> None:
        """Let this process open as many files as ranks and the store need, up to its hard limit."""
        limits.raise_open_files(launchers.files_needed(self._order.placement))

    def handle_signals(self) -> None:
        """Handle the signals :data:`HANDLED`. The handler only notes them, as it may interrupt any code."""
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in HANDLED:
            signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, _: Any) -> None:
        order = StopRequested(ordered=True, fast=number == layout.FAST_KILL_SIGNAL)
        self._asked.append(order if number in _ORDERS else SigtermReceived())

    def _ask(self, event: Event) -> None:
        self._asked.append(event)
        with suppress(BlockingIOError):  # the pipe is full, so the main thread wakes anyway
            os.write(self._pipe[1], b"x")

    def fork_ranks(self) -> None:
        """Fork the ranks, which then wait until they may begin, unless they are new processes.

        This must precede other threads and the store, whose C++ thread sometimes holds locks of libc, as it looks names
        up. A process forked at such a moment would wait for the lock forever.
        """
        if self._order.start_method != "fork":
            return
        gc.collect()
        gc.freeze()  # keeps existing objects shared between the ranks: the collector does not write to their pages
        # What the launcher has imported is not the ranks' to finalize: torch's 134 operator libraries would take 26 ms.
        for finalizer in getattr(weakref.finalize, "_registry", ()):  # without it, ranks only end later
            finalizer.atexit = False
        sys.stdout.flush()
        sys.stderr.flush()
        waiting, self._gate = os.pipe()
        for local_rank in range(self._order.plan.node.local_world_size):
            self._start(partial(self._fork, local_rank, waiting))
        os.close(waiting)

    def run(self) -> None:
        """Watch the ranks until :meth:`end`, or all have been stopped.

        In that case, torch's thread first gets :data:`_TELL_PATIENCE` seconds to tell the other nodes.
        """
        while not self._over.is_set():
            self._wait()
            self._take(TimePassed())
            while self._asked:
                self._take(self._asked.popleft())
            if self._state.has_stopped:
                if self._state.has_begun:  # otherwise the other thread has no store yet to tell other nodes
                    self._over.wait(_TELL_PATIENCE)
                return

    # The thread of torch's elastic agent calls the following methods.

    def begin(self) -> dict[int, int]:
        """Let the ranks begin, and return their pids by local rank."""
        self._ask(BeginRanks())
        with self._changed:
            self._changed.wait_for(lambda: self._state.has_begun)
        return {local_rank: process.pid for local_rank, process in enumerate(self._processes)}

    def await_end(self, timeout: float, *, known: bool = False) -> Mapping[int, bool | None]:
        """Wait until a stop begins, as after a failure, or all ranks but serving ones have ended, or for ``timeout`` s.

        Return whether each rank has succeeded, ``None`` while it runs. If the end is ``known``, wait for a stop only. A
        serving rank, such as a parameter server, runs until :meth:`release`.
        """
        with self._changed:
            serving, state = self._order.plan.serving_here, self._state
            self._changed.wait_for(lambda: state.is_stopping or not (known or state.running(serving)), timeout)
            return {local_rank: rank.succeeded for local_rank, rank in enumerate(state.ranks)}

    @property
    def stopping(self) -> bool:
        """Whether a stop has been requested or has begun."""
        return self._state.is_stopping

    def stop(self) -> None:
        """Stop the ranks, and return once all have ended."""
        self._ask(StopRequested())
        self._await_none()

    def release(self) -> None:
        """End serving ranks, and return once they have ended. They count as succeeded."""
        if self._state.running():
            self._ask(ReleaseRequested())
        self._await_none()

    def _await_none(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._state.running())

    def end(self) -> None:
        """Make :meth:`run` return."""
        self._over.set()
        self._ask(TimePassed())

    # The following methods run in the main thread.

    def _take(self, event: Event) -> None:
        with self._changed:  # other threads see a change only once its actions are performed
            for action in self._state.on(event, time.monotonic()):
                self._perform(action)
            self._changed.notify_all()

    def _perform(self, action: Action) -> None:
        match action:
            case SpawnRanks():
                for local_rank in range(len(self._processes), self._order.plan.node.local_world_size):
                    self._start(partial(self._spawn, local_rank))
            case TellStarted():
                pids = tuple(process.pid for process in self._processes)
                self._tell(messages.RanksStarted(pids, time.time()))
            case OpenGate() if self._gate is not None:
                os.write(self._gate, b"x" * len(self._processes))
                os.close(self._gate)
                self._gate = None
            case TellAgent():
                self._tell(action.message)
            case SignalRanks():
                for local_rank in action.local_ranks:
                    os.kill(self._processes[local_rank].pid, action.number)

    def _start(self, start: Callable[[], int]) -> None:
        # Until a forked rank resets its signal handlers, it has those of the launcher, which would only set a flag.
        # Blocked signals are not lost: they reach the rank later.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = start()
            limits.set_open_files(pid, self._files)
            self._processes.append(_Process(pid, pidfd_open(pid)))
            self._state.add()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def _fork(self, local_rank: int, waiting: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            die_with_parent(parent)
            for sibling in self._processes:
                os.close(sibling.pidfd)
            let_go = os.read(waiting, 1)
            if self._gate is None or not let_go:
                os._exit(1)
            for descriptor in (waiting, self._gate, *self._pipe, self._order.event_fd):
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

    def _wait(self) -> None:
        """Wait until a rank exits, something is asked, or the deadline is over, and reap ranks that have exited."""
        deadline = self._state.deadline
        patience = _IDLE if deadline is None else max(0.0, deadline - time.monotonic())
        running = {self._processes[local_rank].pidfd: local_rank for local_rank in self._state.running()}
        for descriptor in readable([*running, self._pipe[0]], patience):
            if descriptor in running:
                self._reap(running[descriptor])
            else:
                os.read(descriptor, 1 << 16)

    def _reap(self, local_rank: int) -> None:
        process = self._processes[local_rank]
        _, status = os.waitpid(process.pid, 0)
        os.close(process.pidfd)
        ending = rank_exits.read(self._order.slots_fd, local_rank)
        early = rank_exits.leaves_early(self._order.plan.target, ending)
        self._take(ProcessExited(local_rank, os.waitstatus_to_exitcode(status), early, rank_exits.echoes(ending)))
