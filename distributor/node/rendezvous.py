"""The launcher's thread for the rendezvous of all nodes, with torch's elastic agent and rendezvous store.

All that waits for other nodes is here. If the store does not answer, because a node is cut off or its machine hangs,
only this thread is blocked, while the main thread watches the ranks.
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

from distributor.node.rank_supervisor import RankSupervisor
from distributor.rank import lookups, process
from distributor.values import messages
from distributor.values.plan import NodeOrder

_EXIT_BARRIER_TIMEOUT = 365 * 24 * 3600.0  # seconds; slower nodes may train for days

#: Set in the store by a node whose ranks have failed: others notice it even if they cannot reach the driver.
_FAILED_KEY = "distributor/failed"

#: In the store: the number of nodes that have passed the exit barrier, and a flag that is set once all have.
_LEFT_KEY = "distributor/left"
_ALL_LEFT_KEY = "distributor/all_left"

_LEAVE_TIMEOUT = 5.0  # seconds that node 0 waits for all nodes to pass the exit barrier

#: In the store: the number of nodes whose ranks have succeeded, apart from those that only serve others, and a flag
#: that is set once all have. Used only if some ranks serve others, or some nodes have no ranks.
_DONE_KEY = "distributor/done"
_ALL_DONE_KEY = "distributor/all_done"

_FAILED_POLL = 1.0  # seconds between checks of _FAILED_KEY

_DONE_POLL = 0.1  # seconds between checks of _ALL_DONE_KEY

#: Seconds that nodes wait longer for each other than the driver does, whose error says what the run waits for.
_DRIVER_FIRST = 10.0

Tell = Callable[[messages.Message], None]  # sends the agent a message


class Rendezvous(threading.Thread):
    """Runs torch's elastic agent until the ranks of all nodes have succeeded, or this node's must end."""

    def __init__(self, order: NodeOrder, watch: RankSupervisor, tell: Tell) -> None:
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
        """Run torch's elastic agent; tell the node's agent of an error, or that all nodes' ranks have succeeded."""
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
    """A rendezvous of nodes that know their ranks already: the store, started on node 0, is all they need."""

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
            self._order.placement.count,
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

    def __init__(self, spec: WorkerSpec, order: NodeOrder, watch: RankSupervisor) -> None:
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
        if self._order.placement.count > 1 and self._another_node_failed():
            return RunResult(state=WorkerState.FAILED)
        return RunResult(state=WorkerState.HEALTHY)

    def _all_done(self) -> bool:
        """Return whether this node, whose ranks have succeeded, may go to torch's exit barrier.

        It may if all nodes have ranks and none serves others, as a parameter server does. Otherwise, all other ranks
        must have succeeded, too: a serving rank must outlive those that it serves, and a node without ranks would be at
        the barrier from the start, where it cannot learn that another has failed.
        """
        if not self._order.plan.serving and self._order.placement.all_have_ranks:
            return True
        store = cast(Any, self._store)
        with suppress(Exception):  # the store is gone, so node 0 has failed: _another_node_failed notices it
            if not self._done:
                self._done = True
                if store.add(_DONE_KEY, 1) == self._order.placement.count:
                    store.set(_ALL_DONE_KEY, "")
            return bool(store.check([_ALL_DONE_KEY]))
        return False

    def _tell_others(self) -> None:
        """Tell the other nodes that this one has ended without success."""
        with suppress(Exception):
            self._store.set(_FAILED_KEY, str(self._order.plan.node.node_rank))  # type: ignore[attr-defined]

    def _another_node_failed(self) -> bool:
        """Return whether this node must end because another has failed.

        If the store is gone, node 0 has failed. Otherwise, a node without ranks goes on: a rank of node 0 may need its
        companions in order to save.
        """
        try:
            failed = bool(self._store.check([_FAILED_KEY]))  # type: ignore[attr-defined]
            return failed and bool(self._order.plan.node.ranks)
        except Exception:
            return True

    def _exit_barrier(self) -> None:
        """Keep node 0 and its store alive until all nodes have passed torch's exit barrier.

        Node 0 waits :data:`_LEAVE_TIMEOUT` seconds at most. With torch alone, the store would end with node 0, and
        slower nodes would try for a second or two to reach it.
        """
        super()._exit_barrier()  # type: ignore[no-untyped-call]
        nodes, store = self._order.placement.count, cast(Any, self._store)
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
        """Construct an event without the host's full name, whose lookup by torch takes seconds without DNS."""
        return Event(f"torchelastic.worker.status.{state}", source, metadata={"hostname": socket.gethostname()})
