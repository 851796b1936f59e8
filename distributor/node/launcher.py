"""The process that starts a node's ranks, as forks or anew, under torch's elastic agent.

It imports torch once. It runs no user code, starts no Python thread and no parallel region, and never touches CUDA, so
forking from it is safe. It watches its ranks through process descriptors, so it sees each exit at once, with its true
exit code. All communication (log lines, orders, the driver) belongs to the agent, which is another process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list what it exports
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from distributor.machine import bootstrap
from distributor.machine.bootstrap import overwrite_argument, overwrite_environ
from distributor.machine.processes import die_with_parent, pidfd_open, readable
from distributor.node import launching
from distributor.rank import lookups, process
from distributor.values import layout, messages
from distributor.values.environment import NODE_ID
from distributor.values.layout import ALL_STACKS_SIGNAL, MAIN_STACK_SIGNAL
from distributor.values.plan import NodeOrder

#: Number of seconds that a finished node waits for the others at the exit barrier: slower nodes may train for days.
_EXIT_BARRIER_TIMEOUT = 365 * 24 * 3600.0

#: Key that is set in the store when a node's ranks failed, so that other nodes learn of it even without the channel.
_FAILED_KEY = "distributor/failed"

#: Keys in the store: the number of nodes that have passed the exit barrier, and a flag that is set once all have.
_LEFT_KEY = "distributor/left"
_ALL_LEFT_KEY = "distributor/all_left"

#: Number of seconds that node 0 waits for all nodes to pass the exit barrier.
_LEAVE_TIMEOUT = 5.0

#: Signals that stop the ranks.
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: What a spare shows in place of ``launcher``, padded to the same length.
_SPARE = "spare".ljust(len("launcher"), "\0")

#: Number of seconds between checks of ``_FAILED_KEY``.
_FAILED_POLL = 1.0


def main(path: str, agent_pid: str) -> None:
    """Run this node's ranks to their end (entry point of a process started anew)."""
    die_with_parent(int(agent_pid))
    order = launching.read(path)
    for inherited in (order.event_fd, order.store_fd, order.spare_fd):
        if inherited is not None:
            os.set_inheritable(inherited, False)  # ranks that are started anew must not inherit it
    _begin(order, int(agent_pid))


def become(order: NodeOrder, agent_pid: int, owner: int) -> None:
    """Make a fork of the agent look like a process started anew, then run the ranks (entry point of the fork).

    Args:
        order: the agent's order.
        agent_pid: pid of the agent.
        owner: pid of the agent's owner.
    """
    overwrite_argument(bootstrap.title("agent", owner), bootstrap.title("launcher", agent_pid))
    overwrite_environ(bootstrap.UNMARKED, f"{NODE_ID}={order.environ[NODE_ID]}")
    _settle(order)
    _begin(order, agent_pid)


def _settle(order: NodeOrder) -> None:
    """Give a fork the order's environment, and the launcher's log as its output."""
    log = os.open(layout.launcher_log(order.folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.environ.clear()
    os.environ.update(order.environ)


def _begin(order: NodeOrder, agent_pid: int) -> NoReturn:
    """Fork the spare, if there is to be one, and run the ranks."""
    if order.spare_fd is not None:
        _fork_spare(order, order.spare_fd, agent_pid)
    _launch(order)


def _fork_spare(order: NodeOrder, spare_fd: int, agent_pid: int) -> None:
    """Fork the launcher of the next attempt, which waits for its order.

    Until then it ends when its line closes, that is, when the agent ends. The kernel could end it with its parent only,
    and that is this process.
    """
    if os.fork() != 0:
        os.close(spare_fd)
        return
    try:
        for descriptor in (order.event_fd, order.store_fd):
            if descriptor is not None:
                os.close(descriptor)
        overwrite_argument("launcher", _SPARE)
        line = socket.socket(fileno=spare_fd)
        line.send(str(os.getpid()).encode())
        following = launching.await_order(line)
        if following is None:
            os._exit(0)
        die_with_parent(agent_pid)  # the agent has adopted this process by now
        overwrite_argument(_SPARE, "launcher")
        _settle(following)
        _begin(following, agent_pid)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _launch(order: NodeOrder) -> NoReturn:
    """Run the ranks to their end, report what happened, and exit with 0 whatever the outcome."""
    for number in _HANDLED:
        signal.signal(number, _signals.handle)
    for stacks_signal in (ALL_STACKS_SIGNAL, MAIN_STACK_SIGNAL):
        signal.signal(stacks_signal, signal.SIG_IGN)  # by default it would kill a rank that has no handler yet
    agent = None
    try:
        _tell(order, messages.LauncherReady(time.time()))
        spec = WorkerSpec(
            role="default",
            local_world_size=order.plan.node.local_world_size,
            rdzv_handler=_PlacedRendezvous(order),
            entrypoint=process.become,
            max_restarts=0,
            monitor_interval=0.001,  # _monitor_workers itself blocks until a rank exits or it is time to poll
        )
        lookups.switch_off(order.folder)
        agent = _RankAgent(spec, order)
        agent.fork_ranks()
        result = agent.run()
        if not result.is_failed():
            _tell(order, messages.AllPassed())  # all nodes are at the exit barrier: all ranks have succeeded
    except SignalException:
        if agent is not None:
            agent.tell_others()
    except BaseException as error:
        _tell(order, messages.LauncherFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        sys.stderr.flush()
        # The store's server thread must not outlive the run, and no destructor must join it.
        os._exit(0)


class _Signals:
    """Raises the signals that stop the ranks as exceptions, at moments when that does no harm.

    Masking them for this thread is not enough: the store's C++ thread takes a signal that this thread masks, and Python
    then runs the handler here.
    """

    def __init__(self) -> None:
        self._held = False
        self._came: int | None = None

    def handle(self, number: int, _frame: Any) -> None:
        """Handle a signal."""
        self._came = number
        if not self._held:
            self._raise()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put off the exception until the end of the block. Blocks do not nest."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._came is not None:
            self._raise()

    def _raise(self) -> NoReturn:
        number, self._came = self._came, None
        assert number is not None
        raise SignalException(f"got signal {number}", signal.Signals(number))


_signals = _Signals()


def _tell(order: NodeOrder, message: messages.Message) -> None:
    """Send the agent a message as a line of JSON. Short writes to a pipe are atomic (pipe(7), PIPE_BUF)."""
    with suppress(BrokenPipeError):
        os.write(order.event_fd, json.dumps(messages.encode(message)).encode() + b"\n")


class _PlacedRendezvous(RendezvousHandler):
    """A rendezvous whose result is already known: the placement. It only brings up the store."""

    def __init__(self, order: NodeOrder) -> None:
        self._order = order
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "distributor"

    def next_rendezvous(self) -> RendezvousInfo:
        node, master = self._order.plan.node, self._order.placement.master
        listener: dict[str, int] = {} if self._order.store_fd is None else {"master_listen_fd": self._order.store_fd}
        before = time.monotonic()
        self._store = TCPStore(
            master.address,
            master.port,
            is_master=bool(listener),
            wait_for_workers=False,
            timeout=timedelta(seconds=self._order.start_timeout),
            **listener,  # type: ignore[arg-type]
        )
        text = lookups.warning(time.monotonic() - before, master.address) if listener else None
        if text is not None:
            _tell(self._order, messages.LauncherWarning(text))
        return RendezvousInfo(
            self._store,
            node.node_rank,
            len(self._order.placement.nodes),
            RendezvousStoreInfo(master.address, master.port),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._order.run_id

    def shutdown(self) -> bool:
        return True


@dataclass
class _Rank:
    """A rank's process. ``signalled`` is set once it was told to stop; ``exit`` is its wait status as an exit code."""

    local_rank: int
    pid: int
    pidfd: int
    exit: int | None = None
    signalled: bool = field(default=False)


class _RankAgent(SimpleElasticAgent):
    """Torch's elastic agent, with ranks that are forked from this process or started anew."""

    def __init__(self, spec: WorkerSpec, order: NodeOrder) -> None:
        super().__init__(spec, exit_barrier_timeout=_EXIT_BARRIER_TIMEOUT)
        self._order = order
        self._ranks: list[_Rank] = []
        self._gate: int | None = None  # write end of the pipe on which forked ranks wait until they may begin
        self._next_look = 0.0
        self._end: float | None = None  # end of the grace period, once ranks have been told to stop

    def fork_ranks(self) -> None:
        """Fork the ranks, which then wait until they may begin.

        This must happen before the rendezvous store exists. The store's C++ thread sometimes holds locks of libc (it
        looks names up as ranks connect), and a process forked at such a moment would wait for that lock forever.
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

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for local_rank in range(len(self._ranks), self._order.plan.node.local_world_size):
            self._start(local_rank, partial(self._spawn, local_rank))
        if self._gate is not None:
            os.write(self._gate, b"x" * len(self._ranks))
            os.close(self._gate)
            self._gate = None
        pids = {entry.local_rank: entry.pid for entry in self._ranks}
        _tell(self._order, messages.RanksStarted(tuple(pids[rank] for rank in sorted(pids)), time.time()))
        return pids

    def _start(self, local_rank: int, start: Callable[[], int]) -> None:
        # A signal between the fork and the reset of its handler would raise the launcher's exception inside a rank.
        with _signals.held():
            signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
            try:
                pid = start()
                self._ranks.append(_Rank(local_rank, pid, pidfd_open(pid)))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)

    def _fork(self, local_rank: int, waiting: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            let_go = os.read(waiting, 1)
            os.close(waiting)
            if self._gate is None or not let_go:
                os._exit(1)
            os.close(self._gate)
            process.become(self._order, local_rank, parent)
        return pid

    def _spawn(self, local_rank: int) -> int:
        command = bootstrap.command(
            self._order.root, "rank", str(layout.order(self._order.folder)), str(local_rank), str(os.getpid())
        )
        environ = {**self._order.environ, **self._order.plan.rank_env[local_rank]}
        return os.posix_spawn(sys.executable, command, environ)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._await_exits(_FAILED_POLL)
        failed = [entry for entry in self._ranks if entry.exit not in (None, 0)]
        if failed:
            self.tell_others()
            return RunResult(
                state=WorkerState.FAILED,
                failures={
                    worker_group.workers[entry.local_rank].global_rank: ProcessFailure(
                        entry.local_rank, entry.pid, entry.exit or 0, ""
                    )
                    for entry in failed
                },
            )
        if all(entry.exit == 0 for entry in self._ranks):
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})
        if len(self._order.placement.nodes) > 1 and self._another_node_failed():
            return RunResult(state=WorkerState.FAILED)
        return RunResult(state=WorkerState.HEALTHY)

    def tell_others(self) -> None:
        """Tell the other nodes, over the store, that this one has ended without success."""
        with suppress(Exception):
            self._store.set(_FAILED_KEY, str(self._order.plan.node.node_rank))  # type: ignore[attr-defined]

    def _another_node_failed(self) -> bool:
        """Return whether another node failed. Asks the store at most once a second; if it is gone, so is node 0."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _FAILED_POLL
        try:
            return bool(self._store.check([_FAILED_KEY]))  # type: ignore[attr-defined]
        except Exception:
            return True

    def _await_exits(self, timeout: float) -> None:
        """Wait until a rank exits, for ``timeout`` seconds at most, and reap all ranks that have exited."""
        running = {entry.pidfd: entry for entry in self._ranks if entry.exit is None}
        ready = readable(running, timeout)
        now = time.time()
        # A signal between waitpid and the record of the exit would leave a reaped pid that still counts as running.
        with _signals.held():
            for pidfd in ready:
                self._reap(running[pidfd], now)

    def _reap(self, entry: _Rank, now: float) -> None:
        _, status = os.waitpid(entry.pid, 0)
        os.close(entry.pidfd)
        entry.exit = os.waitstatus_to_exitcode(status)
        _tell(self._order, messages.RankExited(entry.local_rank, entry.exit, entry.signalled, now))

    def _exit_barrier(self) -> None:
        """Keep node 0 until all nodes have passed the exit barrier, because the store ends with node 0.

        Torch's agents do not wait: an agent that has not passed yet looks for the store for a second or two.
        """
        super()._exit_barrier()  # type: ignore[no-untyped-call]
        nodes, store = len(self._order.placement.nodes), cast(Any, self._store)
        if nodes > 1:
            with suppress(Exception):  # the store or a node is gone already
                if store.add(_LEFT_KEY, 1) == nodes:
                    store.set(_ALL_LEFT_KEY, "")
                if self._order.plan.node.node_rank == 0:
                    store.wait([_ALL_LEFT_KEY], timedelta(seconds=_LEAVE_TIMEOUT))

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """Send SIGTERM, wait for the grace period, then send SIGKILL. Ranks that have not begun get no grace period.

        The order to stop may come while ranks are already being stopped after a failure. Each rank still gets one
        SIGTERM and one grace period.
        """
        if self._end is None:
            self._end = time.monotonic() + (self._order.grace_period if self._gate is None else 0.0)
            self._signal_running(signal.SIGTERM)
        while self._running() and time.monotonic() < self._end:
            self._await_exits(max(0.0, self._end - time.monotonic()))
        self._signal_running(signal.SIGKILL)
        while self._running():
            self._await_exits(60.0)

    def _running(self) -> list[_Rank]:
        return [entry for entry in self._ranks if entry.exit is None]

    def _signal_running(self, number: signal.Signals) -> None:
        for entry in self._running():
            entry.signalled = True
            os.kill(entry.pid, number)

    def _construct_event(self, state: str, source: Any, *_: Any, **__: Any) -> Event:
        """Construct an event without torch's look-up of the full host name: seconds each where DNS does not answer."""
        return Event(f"torchelastic.worker.status.{state}", source, metadata={"hostname": socket.gethostname()})
