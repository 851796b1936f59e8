"""The launcher's thread for the rendezvous of all nodes, which uses torch's elastic agent and rendezvous store.

The launcher has two threads. The thread in this module does everything that waits for other nodes, and the main thread
watches the ranks. If the rendezvous store does not answer, because another node is cut off or its machine hangs, only
the thread in this module is blocked.
"""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list what it exports
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from distributor.node.watch import Watch
from distributor.rank import lookups, process
from distributor.values import messages
from distributor.values.plan import NodeOrder

#: Number of seconds that a finished node waits for the others at the exit barrier. Slower nodes may train for days.
_EXIT_BARRIER_TIMEOUT = 365 * 24 * 3600.0

#: Key that a node sets in the store when its ranks have failed, so that other nodes notice the failure even if they
#: cannot reach the driver.
_FAILED_KEY = "distributor/failed"

#: Keys in the store: the number of nodes that have passed the exit barrier, and a flag that is set once all have.
_LEFT_KEY = "distributor/left"
_ALL_LEFT_KEY = "distributor/all_left"

#: Number of seconds that node 0 waits for all nodes to pass the exit barrier.
_LEAVE_TIMEOUT = 5.0

#: Keys in the store: the number of nodes whose ranks have succeeded, and a flag that is set once this is true of all
#: nodes. Ranks that only serve other ranks, such as parameter servers, do not count. Nodes use these keys only if some
#: ranks serve others, or if some nodes have no ranks.
_DONE_KEY = "distributor/done"
_ALL_DONE_KEY = "distributor/all_done"

#: Number of seconds between checks of ``_FAILED_KEY``.
_FAILED_POLL = 1.0

#: Number of seconds between checks of ``_ALL_DONE_KEY``.
_DONE_POLL = 0.1

#: Nodes wait for each other this number of seconds longer than the driver waits for them. So the driver gives up
#: first, and its error says what the run waits for.
_DRIVER_FIRST = 10.0

#: The type of a function that sends the agent a message.
Tell = Callable[[messages.Message], None]


class Meeting(threading.Thread):
    """The thread that runs torch's elastic agent: until the ranks of all nodes have succeeded, or this node's must end.

    Args:
        order: the order that the launcher got from its agent.
        watch: starts, watches and stops the node's ranks in the main thread.
        tell: sends the node's agent a message.
    """

    def __init__(self, order: NodeOrder, watch: Watch, tell: Tell) -> None:
        super().__init__(name="distributor-meeting", daemon=True)
        self._watch = watch
        self._tell = tell
        spec = WorkerSpec(
            role="default",
            local_world_size=max(1, order.plan.node.local_world_size),  # torch refuses 0
            rdzv_handler=_PlacedRendezvous(order, tell),
            entrypoint=process.become,
            max_restarts=0,
            monitor_interval=0.001,  # no pause is needed: _monitor_workers itself waits for a rank to exit
        )
        self._agent = _RankAgent(spec, order, watch)

    def run(self) -> None:
        """Run torch's elastic agent.

        Report to this node's agent process (not to torch's agent) if torch's agent raises an error, or if the ranks of
        all nodes have succeeded.
        """
        try:
            result = self._agent.run()
            if not result.is_failed():
                self._tell(messages.AllPassed())  # all nodes reached the exit barrier, so all ranks succeeded
        except BaseException as error:
            if not self._watch.stopping:
                self._tell(messages.LauncherFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        finally:
            self._watch.end()


class _PlacedRendezvous(RendezvousHandler):
    """A rendezvous for nodes that already know the placement, which says which rank runs on which node.

    On node 0, this class starts the rendezvous store. On other nodes, it connects to this store. Nothing else is left
    to do, because each node already knows its rank.
    """

    def __init__(self, order: NodeOrder, tell: Tell) -> None:
        self._order = order
        self._tell = tell
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
            timeout=timedelta(seconds=self._order.start_timeout + _DRIVER_FIRST),
            **listener,  # type: ignore[arg-type]
        )
        text = lookups.warning(time.monotonic() - before, master.address) if listener else None
        if text is not None:
            self._tell(messages.LauncherWarning(text))
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


class _RankAgent(SimpleElasticAgent):
    """Torch's elastic agent, whose workers are the ranks that the main thread has started."""

    def __init__(self, spec: WorkerSpec, order: NodeOrder, watch: Watch) -> None:
        super().__init__(spec, exit_barrier_timeout=_EXIT_BARRIER_TIMEOUT)
        self._order = order
        self._watch = watch
        self._done = False  # whether all ranks of this node that serve no others have succeeded

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self._watch.begin()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        succeeded = self._watch.await_end(_DONE_POLL if self._done else _FAILED_POLL, known=self._done)
        failed = [local_rank for local_rank, ended_well in succeeded.items() if ended_well is False]
        if self._watch.stopping or (failed and None not in succeeded.values()):
            self._tell_others()
            failures = {
                worker_group.workers[local_rank].global_rank: ProcessFailure(local_rank, 0, 1, "")
                for local_rank in failed
            }
            return RunResult(state=WorkerState.FAILED, failures=failures)
        serving = self._order.plan.serving_here
        others = (ended_well for local_rank, ended_well in succeeded.items() if local_rank not in serving)
        if all(others) and self._all_done():
            self._watch.release()
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})
        if len(self._order.placement.nodes) > 1 and self._another_node_failed():
            return RunResult(state=WorkerState.FAILED)
        return RunResult(state=WorkerState.HEALTHY)

    def _all_done(self) -> bool:
        """Return whether this node may go to torch's exit barrier, now that its ranks have succeeded.

        If all nodes have ranks, and no rank serves others (as a parameter server does), a node may go to the barrier as
        soon as its own ranks have succeeded. Otherwise, it must also wait until the ranks of all other nodes have
        succeeded, apart from ranks that serve others. There are two reasons for this. A rank that serves others must
        not end before the ranks that it serves. And a node without ranks would wait at the barrier from the start,
        where it cannot learn that another node has failed.
        """
        if not self._order.plan.serving and all(node.ranks for node in self._order.placement.nodes):
            return True
        store = cast(Any, self._store)
        with suppress(Exception):  # the store is gone, so node 0 has failed: _another_node_failed notices it
            if not self._done:
                self._done = True
                if store.add(_DONE_KEY, 1) == len(self._order.placement.nodes):
                    store.set(_ALL_DONE_KEY, "")
            return bool(store.check([_ALL_DONE_KEY]))
        return False

    def _tell_others(self) -> None:
        """Tell the other nodes, over the rendezvous store, that this node has ended without success."""
        with suppress(Exception):
            self._store.set(_FAILED_KEY, str(self._order.plan.node.node_rank))  # type: ignore[attr-defined]

    def _another_node_failed(self) -> bool:
        """Return whether this node must end because another node has failed.

        The rendezvous store is on node 0. If the store is gone, node 0 has failed, and this node must end. If another
        node has failed but the store is there, only a node with ranks must end. A node without ranks goes on, because
        it runs companions (helper processes, such as Ray) that a rank of node 0 may need in order to save.
        """
        try:
            failed = bool(self._store.check([_FAILED_KEY]))  # type: ignore[attr-defined]
            return failed and bool(self._order.plan.node.ranks)
        except Exception:
            return True

    def _exit_barrier(self) -> None:
        """Keep node 0 and its rendezvous store alive until all nodes have passed torch's exit barrier.

        After torch's exit barrier, node 0 waits at most :data:`_LEAVE_TIMEOUT` seconds until every other node has
        passed the barrier too. With torch alone, node 0 would not wait. The rendezvous store would end with node 0, and
        a slower node would try for a second or two to reach it.
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
        self._watch.stop()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing, since ranks that must stop have been stopped already."""

    def _construct_event(self, state: str, source: Any, *_: Any, **__: Any) -> Event:
        """Construct an event for torch's elastic agent.

        Torch's own method is not used, because it looks up the host's full name, which takes seconds without DNS.
        """
        return Event(f"torchelastic.worker.status.{state}", source, metadata={"hostname": socket.gethostname()})
