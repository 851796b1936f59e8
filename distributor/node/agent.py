"""The agent: runs one node, from placing the ranks to reporting their outcomes, without Spark and torch.

At the end, it kills all remaining processes of the node and, once its owner has read the outcomes, removes the files.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distributor.channel import control
from distributor.channel.node import Offsets
from distributor.launch import assign_ranks
from distributor.machine import folders, limits, model_servers, network, processes, versions
from distributor.node import launchers, rank_exits, reaper, staging, state_keeper
from distributor.node.attempt_orders import AttemptOrders
from distributor.node.driver_link import DriverLink
from distributor.node.launchers import Launcher, SpawnedLauncher
from distributor.node.new_files import NewFiles, begin_files
from distributor.node.node_attempt import Assignment, AttemptEnded, NodeAttempt, Notes
from distributor.node.result_sender import ResultSender
from distributor.node.system_metrics import Sampler
from distributor.node.tailing import Tailing
from distributor.shipping import package
from distributor.values import codec, environment, layout, messages
from distributor.values.job import Job
from distributor.values.outcome import NodeReport
from distributor.values.placement import Node, NodeFacts, Placement, Share
from distributor.values.plan import AgentOrder, Site

_IN_USE = 10.0  # seconds for a model on this node's GPUs to end: tasks that Spark has ended may still compute a batch

_SIGTERM_WINDOW = 0.2  # after the owner's end: processes of a machine that shuts down get SIGTERM in any order


def main(owner_pid: str, *inherited: str) -> None:
    """Fork the agent, and become its guard (entry point). ``inherited`` are its sockets, such as ``"control=3"``."""
    descriptors = {name: int(number) for name, _, number in (item.partition("=") for item in inherited)}
    reaper.fork("agent", "guard", descriptors.values())
    sockets = {name: socket.socket(fileno=descriptor) for name, descriptor in descriptors.items()}
    _run(sockets, int(owner_pid), SpawnedLauncher(), [])


def serve(inherited: Mapping[str, int], owner_pid: int, notes: list[str]) -> None:
    """Run the agent in this fork of a warm process; the launcher is forked first, before there are threads."""
    sockets = {name: socket.socket(fileno=descriptor) for name, descriptor in inherited.items()}
    _run(sockets, owner_pid, launchers.fork(sockets, owner_pid), notes)


def _run(sockets: Mapping[str, socket.socket], owner_pid: int, launcher: Launcher, notes: list[str]) -> None:
    message = control.receive(sockets["control"])
    if message is not None:
        asyncio.run(_Agent(AgentOrder(**message), sockets, launcher, notes).run(owner_pid))


class _Agent:
    """The agent of one node.

    Its sockets are the control line and, in some runs, one to the driver and a listening one for the rendezvous store.
    """

    def __init__(
        self, order: AgentOrder, sockets: Mapping[str, socket.socket], launcher: Launcher, warnings: list[str]
    ) -> None:
        self._order = order
        # The job may contain a launch path of another package.
        sys.path += [path for path in order.sys_path if path not in sys.path]
        self._job: Job = package.attach(pickle.loads(order.job), order.parts)
        self._control = sockets["control"]
        self._store = sockets.get("store")
        self._launcher = launcher
        self._link = DriverLink(order, self._job, sockets.get("channel"), self)
        self._owner_gone = asyncio.Event()
        self._terminated = False
        most = self._job.recovery.max_restarts if self._job.launch.restarts else 0
        self._restarts = AttemptOrders(most, self._job.attempt)
        self._share: Share | None = None  # what this node knows of the placement
        self._attempt: NodeAttempt | None = None
        self._logs: Tailing | None = None
        self._files: NewFiles | None = None
        self._sampler: Sampler | None = None
        warnings = [*warnings, *([order.note] if order.note is not None else [])]
        self._notes = Notes({**order.times, "agent": time.time()}, warnings)

    async def run(self, owner_pid: int) -> None:
        """Run the node, report to the owner, and clean up once the owner has closed the control line."""
        loop = asyncio.get_running_loop()
        folder = self._order.folder
        lock = folders.claim(folder)
        folders.remove_stale()
        processes.adopt_orphans()
        loop.add_reader(self._control, self._on_control)
        loop.add_signal_handler(signal.SIGTERM, self._on_terminated)
        owner, kept, failed = None, None, True
        try:
            try:
                owner = _watch_process(loop, owner_pid, self._on_owner_gone)
                site, attempt = await self._open()
                kept = await state_keeper.begin(
                    self._job, self._order, site.memory, site.node.address, reached=self._link.is_open
                )
                report, small, failed = await self._train(site, attempt)
            except Exception as error:
                told = rank_exits.explain(error, folder)
                report, small, failed = NodeReport(-1, socket.gethostname(), error=told), {}, True
                await self._link.fail(self._share, self._restarts.ordered)
            await self._hand_over(report, small, failed)
            await self._owner_gone.wait()
        finally:
            if owner is not None:
                loop.remove_reader(owner)
                os.close(owner)
            if self._files is not None:
                self._files.close()
            if self._attempt is not None:
                processes.kill_node(self._attempt.node_id, os.getpid())
            if kept is not None:
                kept.end(keep=failed)
            lock.close()  # from now on, the folder is stale
            folders.remove(folder)

    async def _open(self) -> tuple[Site, NodeAttempt]:
        """Prepare the node and its first attempt, and connect to the driver."""
        loop = asyncio.get_running_loop()
        if self._job.attempt:
            await loop.run_in_executor(None, processes.kill_earlier, self._job.run_id, self._job.attempt)
        site = self._site()
        staging.unpack(self._job, self._order)
        if self._job.data:
            await loop.run_in_executor(None, staging.await_data, self._job, site.node.host)
        attempt = self._prepare(site)
        if (warning := await self._link.open(site.placement)) is not None:
            self._notes.warnings.append(warning)
        if self._owner_gone.is_set():  # the link could not tell the driver before
            self._link.orphan(lives=False)
        self._link.warn(site.node.host, self._notes.warnings)
        assert self._logs is not None
        self._link.carry(self._logs)
        if models := model_servers.on_gpus(site.node.gpus, self._order.spark_executor) if site.node.gpus else []:
            await self._vacate(models, site.node)
        return site, attempt

    async def _vacate(self, models: list[str], node: Node) -> None:
        """Let the models that ``predict`` keeps on this node's GPUs end before the ranks begin."""
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(None, model_servers.vacate, models, _IN_USE):
            self._warn(
                f"shares the memory of GPU {','.join(node.gpus)} with a model that tasks of predict still use: run one "
                "after the other, or give each GPUs of its own"
            )

    async def _train(self, site: Site, attempt: NodeAttempt) -> tuple[NodeReport, Mapping[int, bytes], bool]:
        """Run attempts as the driver orders.

        Return the node's report, the pickled values by rank except large ones, which are in files, and whether it has
        failed.
        """
        if self._job.sample_every is not None and self._link.is_open:
            loop = asyncio.get_running_loop()
            self._sampler = Sampler(
                self._job.sample_every, lambda values: loop.call_soon_threadsafe(self._send_load, values)
            )
            self._sampler.start()
        self._files = await begin_files(self._job, self._order, site.node, self._link, self._pids, self._warn)
        ended = await attempt.run()
        while ended.failed and (following := await self._await_next(site, ended)) is not None:
            site = following
            ended = await self._begin(site).run()
        ended.launcher.kill()
        if self._sampler is not None:
            self._sampler.stop()
        notes, node = self._notes, site.node
        if self._files is not None:
            await self._files.finish(lambda bringing: self._link.tell(messages.Keeping(bringing)))
        warnings = tuple(notes.warnings)
        tells = node.node_rank in (0, site.placement.count - 1) and not self._order.placed
        placement = Placement(site.placement.nodes) if tells else None
        report = NodeReport(
            node.node_rank, node.host, ended.outcomes, ended.error, notes.times, warnings, ended.gave_up, placement
        )
        return report, ended.values, ended.failed

    async def _await_next(self, site: Site, ended: AttemptEnded) -> Site | None:
        """Tell the driver that the attempt has failed, and wait for its decision about another one.

        Return the site of the next attempt; ``None`` if there is none.
        """
        assert self._attempt is not None
        if self._attempt.terminated or not (self._restarts.possible and self._link.is_open):
            return None
        staging.clear(self._order)
        self._store = network.listen(site.node.address)
        port = self._store.getsockname()[1]
        self._link.tell(*rank_exits.stopped(site.attempt, port, ended.outcomes, ended.error))
        begin = await self._restarts.wait()
        if begin is None:
            self._store.close()
            return None
        self._launcher = launchers.living(ended.launcher)
        placement = assign_ranks.with_port(site.placement, begin.port)
        return replace(site, placement=placement, attempt=begin.attempt)

    def _begin(self, site: Site) -> NodeAttempt:
        assert self._logs is not None
        self._logs.begin_again()
        self._link.renew()
        stop = self._restarts.begun()
        attempt = self._prepare(site)
        if stop is not None:
            attempt.on_order(stop)
        return attempt

    def _place(self) -> tuple[Share, tuple[str, ...]]:
        """Return what this node knows of the placement, and warnings.

        The driver has placed the ranks, unless a task could not reach it. StartError if hosts' versions do not work
        together, ResourceError if the ranks do not fit on the nodes.
        """
        if self._order.placed:
            placed, *rest = map(messages.decode, self._order.placed)
            assert isinstance(placed, messages.Placed) and placed.share is not None
            nodes = (each.nodes for each in rest if isinstance(each, messages.AllNodes))
            return replace(placed.share, nodes=next(nodes, ())), placed.warnings
        facts = codec.build(tuple[NodeFacts, ...], self._order.facts)
        placement = assign_ranks.place_checked(facts, self._job)
        share = placement.shares(whole=True)[placement.node_of(self._order.executor).node_rank]
        return share, tuple(versions.differences(self._job.versions, facts[0], facts[share.node.leader]))

    def _site(self) -> Site:
        placement, warnings = self._place()
        self._share = placement
        node, files = placement.node, launchers.files_needed(placement)
        shortages = limits.shortages(limits.here(), node.local_world_size, self._job.resources.use_gpu, files)
        interface, warning = network.interface_towards(node.address, placement.others)
        self._notes.warnings += [*warnings, *shortages, *([] if warning is None else [warning])]
        knows = environment.nccl_knows_better(os.environ, network.has_ipv4)
        sockets = environment.sockets(os.environ, interface, knows)
        memory, unusable = staging.shared_memory(self._job, self._order, placement.beside)
        self._notes.warnings += unusable
        return Site(self._job, placement, os.environ, sockets, self._order.folder, self._job.attempt, memory=memory)

    def _prepare(self, site: Site) -> NodeAttempt:
        """Prepare the node's folder for an attempt."""
        plan = self._job.launch.plan(site)
        staging.write(plan, self._order.folder)
        if self._logs is None:
            self._logs = self._follower(site.node)
        assignment = Assignment(
            staging.launcher_order(self._order, plan, site),
            self._store,
            staging.shipped(self._job, self._order),
            watch=self._job.deadlines.stall_timeout is not None,
            spare=self._restarts.spare and self._job.startup.start_method == "fork",
            number=site.attempt,
        )
        self._attempt = NodeAttempt(assignment, self._launcher, self._link, self._logs, self._notes)
        if self._terminated:
            self._attempt.on_terminated()
        if self._owner_gone.is_set():
            self._attempt.on_owner_gone()
        return self._attempt

    def _follower(self, node: Node) -> Tailing:
        """Follow the ranks' log files through all attempts."""
        files = [
            (node.first_rank + local_rank, stream, layout.rank_log(self._order.folder, local_rank, name))
            for local_rank in range(node.local_world_size)
            for stream, name in enumerate(layout.STREAMS, start=1)
        ]
        return Tailing(files, self._job.output.log_ranks, self._job.output.keep_logs)

    async def _hand_over(self, report: NodeReport, small: Mapping[int, bytes], failed: bool) -> None:
        """Send the results to the driver, both directly and through the owner."""
        finished = [outcome.rank for outcome in report.outcomes if outcome.state == "finished"]
        files = {rank: layout.value(self._order.folder, rank) for rank in finished}
        values: dict[int, bytes | str] = {
            **{rank: str(path) for rank, path in files.items() if path.exists()},
            **{rank: small[rank] for rank in finished if rank in small},
        }
        sender = ResultSender(self._order, self._link, self._job.deadlines.heartbeat_timeout)
        if not failed:
            sender.announce(replace(report, passed=True), values)
        failed = await self._link.close() or failed
        left: dict[int, bytes | str | messages.Sent] = {**values}
        if not failed:
            left, failed = await sender.send(values)
        rest = self._logs.rest() if self._logs is not None else ()
        try:
            told = pickle.dumps(replace(report, passed=not failed))
            unsent = () if self._files is None else self._files.left
            result = messages.NodeResult(told, left, rest, failed, unsent, report.node_rank, self._link.is_cut)
            control.send(self._control, messages.encode(result))
        except OSError:  # the owner is gone, and no process waits for the report
            self._owner_gone.set()

    def on_order(self, order: messages.Message) -> None:
        if isinstance(order, messages.Terminate):
            self._on_terminated()
            return
        if isinstance(order, messages.Stop) and not order.grace and self._files is not None:
            self._files.give_up()
        if not self._restarts.on_order(order) and self._attempt is not None:
            self._attempt.on_order(order)

    def _send_load(self, values: Mapping[str, float]) -> None:
        self._link.send(messages.SystemMetrics(time.time(), values))

    def _pids(self) -> Mapping[int, int]:
        return {} if self._attempt is None else self._attempt.alive_pids

    def _warn(self, text: str) -> None:
        self._notes.warnings.append(text)
        self._link.warn(socket.gethostname(), [text])

    def on_offsets(self, offsets: Offsets, again: bool) -> None:
        if self._logs is not None:
            self._logs.driver_has(offsets, again)

    def status(self) -> messages.Beat:
        return messages.Beat(0) if self._attempt is None else self._attempt.status()

    def on_driver_lost(self) -> None:
        """Stop sending output and, outside local mode, the ranks."""
        self._restarts.end()
        if self._logs is not None:
            self._logs.stop_shipping()
        if self._attempt is not None and not self._link.is_private:  # local mode watches the driver's process instead
            self._attempt.give_up(f"heard nothing from the driver for {self._job.deadlines.heartbeat_timeout:g} s")

    def _on_terminated(self) -> None:
        """Let the ranks save and end, since this node got SIGTERM. No attempt follows here."""
        self._terminated = True
        self._restarts.end()
        if self._attempt is not None:
            self._attempt.on_terminated()

    def _on_owner_gone(self) -> None:
        self._owner_gone.set()
        self._restarts.end()
        if self._attempt is not None and self._attempt.awaits_sigterm:
            asyncio.get_running_loop().call_later(_SIGTERM_WINDOW, self._become_orphan)
        else:
            self._become_orphan()

    def _become_orphan(self) -> None:
        lives = self._attempt is not None and self._attempt.on_owner_gone()
        self._link.orphan(lives=lives)
        if not lives and self._files is not None:
            self._files.on_owner_gone()

    def _on_control(self) -> None:
        """Note that the owner is gone: it sends nothing after its one order, so it has closed the control line."""
        asyncio.get_running_loop().remove_reader(self._control)
        self._on_owner_gone()


def _watch_process(loop: asyncio.AbstractEventLoop, pid: int, callback: Any) -> int | None:
    """Call a function when a process ends, soon if it already has, and return the descriptor to watch.

    If the kernel has no process descriptors, only the end of the control line shows the process's end.
    """
    try:
        descriptor = processes.pidfd_open(pid)
    except ProcessLookupError:
        loop.call_soon(callback)
        return None
    except OSError:
        return None

    def ended() -> None:
        loop.remove_reader(descriptor)
        callback()

    loop.add_reader(descriptor, ended)
    return descriptor
