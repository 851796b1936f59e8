"""The agent: runs one node of a run, from the facts of all tasks to the outcomes of its ranks.

The agent uses neither Spark nor torch. Its owner, the process that starts it (a Spark task's Python worker, or the
driver in local mode), holds the other end of its control line. The agent gives the launcher its order, and passes on
the ranks' log lines and the driver's orders. At the end it leaves nothing behind: no process of the node, and no file
once its owner has read the outcomes.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from distributor import errors
from distributor.channel import control, frames
from distributor.channel.node import Dial, Uplink, over_socket, over_tls
from distributor.launch import placement
from distributor.machine import folders, limits, network, processes, versions
from distributor.node import activity
from distributor.node.launching import ForkedLauncher, Launcher, SpawnedLauncher
from distributor.node.ranks import Ranks
from distributor.node.tailing import Tailing
from distributor.shipping import package, project
from distributor.text.wording import who
from distributor.values import environment, layout, messages
from distributor.values.environment import NODE_ID
from distributor.values.job import Function, Job, Script
from distributor.values.outcome import Failure, NodeReport, Outcome
from distributor.values.placement import Node, NodeFacts, Placement
from distributor.values.plan import AgentOrder, Endpoint, NodeOrder, Plan, Site

#: Maximum number of seconds between heartbeats. Several heartbeats must fit into each time-out that depends on them.
_BEAT_INTERVAL = 5.0

#: Maximum number of files that a warning names.
_NEW_FILES = 5

#: Number of seconds after the grace period when the launcher is killed, if it has not stopped its ranks by then.
_STOP_MARGIN = 3.0


#: Number of seconds that ranks have to write their stacks, if asked to, before they are told to stop.
_LAST_WORDS = 0.3

#: Number of seconds that an agent whose owner is gone waits for the driver.
_ORPHAN_PATIENCE = 3.0

T = TypeVar("T")

#: The log streams of a rank. The last is what Python prints for an uncaught exception.
_STREAMS = ("stdout", "stderr", "uncaught")


def main(owner_pid: str, *inherited: str) -> None:
    """Run the agent in a process started anew: ``main("4711", "control=3", "store=4", "channel=5")``."""
    sockets = {}
    for item in inherited:
        name, _, descriptor = item.partition("=")
        sockets[name] = socket.socket(fileno=int(descriptor))
    _run(sockets, int(owner_pid), SpawnedLauncher(), [])


def serve(sockets: Mapping[str, socket.socket], owner_pid: int, notes: list[str]) -> None:
    """Run the agent in a fork of a warm process. The launcher is forked first, before this process has threads."""
    _run(sockets, owner_pid, ForkedLauncher(sockets, owner_pid), notes)


def _run(sockets: Mapping[str, socket.socket], owner_pid: int, launcher: Launcher, notes: list[str]) -> None:
    message = control.receive(sockets["control"])
    if message is not None:
        asyncio.run(_Agent(AgentOrder(**message), sockets, owner_pid, launcher, notes).run())


class _Agent:
    def __init__(
        self,
        order: AgentOrder,
        sockets: Mapping[str, socket.socket],
        owner_pid: int,
        launcher: Launcher,
        notes: list[str],
    ) -> None:
        self._order = order
        self._job: Job = package.attach(pickle.loads(order.job), order.parts)
        self._control = sockets["control"]
        self._store = sockets.get("store")
        self._channel = sockets.get("channel")
        self._owner_pid = owner_pid
        self._owner_gone = asyncio.Event()
        self._uplink: Uplink | None = None
        self._launcher = launcher
        self._node: Node | None = None
        self._ranks = Ranks()
        self._tailing: Tailing | None = None
        self._activity: activity.Activity | None = None
        self._dumps: set[asyncio.Task[None]] = set()
        self._stopping_soon: asyncio.Task[None] | None = None
        self._warnings = [*notes, *([order.note] if order.note is not None else [])]
        self._gave_up: str | None = None
        self._run_failed = True  # until the launcher and all other nodes have passed the exit barrier
        self._stopping = False
        self._backstop: asyncio.TimerHandle | None = None
        self._times = {**order.times, "agent": time.time()}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        folder = Path(self._order.folder)
        lock = folders.claim(folder)
        folders.remove_stale()
        processes.adopt_orphans()
        loop.add_reader(self._control, self._on_control)
        owner = node_id = None
        try:
            try:
                owner = _watch_process(loop, self._owner_pid, self._on_owner_gone)
                who, node = self._place()
                interface, warning = network.interface_towards(node.address, [other.address for other in who.nodes])
                self._warnings += [warning] if warning is not None else []
                sockets = environment.sockets(os.environ, interface, environment.nccl_knows_better(os.environ))
                plan = self._job.launch.plan(Site(self._job, who, node, os.environ, sockets, str(folder)))
                node_id = str(plan.node_env[NODE_ID])
                report = await self._train(self._prepare(plan, who, folder), node_id)
            except Exception as error:
                report = NodeReport(-1, socket.gethostname(), error=_explain(error))
                self._tell(messages.Failed())
            await self._close_channel()
            self._report(report, folder)
            await self._owner_gone.wait()
        finally:
            lock.close()
            if owner is not None:
                loop.remove_reader(owner)
                os.close(owner)
            if node_id is not None:
                processes.kill_node(node_id, os.getpid())
            folders.remove(folder)

    def _place(self) -> tuple[Placement, Node]:
        """Return the placement and this node's part of it. Conflicts are errors, lesser problems warnings."""
        job, facts = self._job, [NodeFacts.from_json(fact) for fact in self._order.facts]
        if (conflict := versions.conflict(job.versions, facts)) is not None:
            raise errors.StartError(conflict)
        who = placement.place(facts, job)
        node = who.node_of(self._order.executor)
        self._warnings += versions.differences(job.versions, facts, facts[node.leader])
        self._warnings += limits.shortages(limits.here(), node.local_world_size, job.use_gpu)
        return who, node

    def _report(self, report: NodeReport, folder: Path) -> None:
        values = {
            outcome.rank: str(path)
            for outcome in report.outcomes
            if outcome.state == "finished" and (path := layout.value(folder, outcome.rank)).exists()
        }
        rest = self._tailing.rest() if self._tailing is not None else ()
        result = messages.NodeResult(pickle.dumps(report), values, rest, self._run_failed)
        try:
            control.send(self._control, messages.encode(result))
        except OSError:  # the owner is gone, and no process waits for the report
            self._owner_gone.set()

    def _prepare(self, plan: Plan, who: Placement, folder: Path) -> NodeOrder:
        """Unpack shipped files into the node's folder, and return the launcher's order."""
        job, cwd = self._job, None
        if job.working_dir is not None:
            cwd = job.working_dir.path
            if not self._order.on_driver:
                assert job.working_dir.archive is not None
                cwd = str(layout.working_dir(folder))
                project.unpack_folder(job.working_dir.archive, Path(cwd))
        if isinstance(job.target, Script) and not self._order.on_driver:
            copy = layout.script(folder, job.target)
            copy.parent.mkdir()
            copy.write_bytes(job.target.source)
        folders.note_elsewhere(folder, plan.elsewhere)
        for name, text in plan.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        sys_path = [os.path.abspath(path) for path in self._order.sys_path]
        if cwd is not None:
            sys_path.insert(0, cwd)
        if self._order.root not in sys_path:
            sys_path.append(self._order.root)
        return NodeOrder(
            run_id=job.run_id,
            plan=plan,
            placement=who,
            grace_period=job.grace_period,
            start_timeout=job.start_timeout,
            store_fd=self._store.fileno() if self._store is not None and plan.node.node_rank == 0 else None,
            event_fd=-1,
            folder=str(folder),
            cwd=cwd,
            sys_path=tuple(sys_path),
            collect_all=job.collect == "all",
            start_method=job.start_method,
            root=self._order.root,
            environ=environment.apply(os.environ, plan.node_env),
        )

    async def _train(self, order: NodeOrder, node_id: str) -> NodeReport:
        """Run the launcher to its end, and return the report on its ranks."""
        loop = asyncio.get_running_loop()
        node, folder = order.plan.node, Path(order.folder)
        self._node = node
        self._tailing = logs = Tailing(
            [
                (node.first_rank + local_rank, stream, layout.rank_log(folder, local_rank, name))
                for local_rank in range(node.local_world_size)
                for stream, name in enumerate(_STREAMS, start=1)
            ],
            self._job.log_ranks,
            self._job.keep_logs,
        )
        await self._open_channel(order, logs)
        oom_before = processes.oom_kills()
        if isinstance(self._launcher, SpawnedLauncher):
            self._tell_importing(order, "torch")
        events = self._launcher.start(order)
        if self._store is not None:
            self._store.close()  # the launcher has its own copy now
        if self._stopping:  # the order to stop came while the launcher was starting
            self._launcher.kill()
        following = asyncio.ensure_future(logs.follow())
        reaping = asyncio.ensure_future(_reap_orphans(self._launcher.pid))
        await self._follow_events(events, order)
        await loop.run_in_executor(None, self._launcher.wait)
        stopped = self._stopping  # read now: reporting a failure leads to an order to stop
        start_error = self._ranks.start_error(self._launcher, order, stopped)
        if not stopped and (start_error is not None or self._ranks.alive):
            self._tell(messages.Failed())
        if self._backstop is not None:
            self._backstop.cancel()
        self._times["exited"] = time.time()
        # Kill what ranks left behind (data-loader workers, children with their own sessions) before the last log lines.
        await loop.run_in_executor(None, processes.kill_node, node_id, os.getpid())
        following.cancel()
        reaping.cancel()
        await asyncio.gather(following, reaping, return_exceptions=True)
        await self._unless_orphaned(logs.drain())
        self._warn_of_losses(order)
        outcomes = self._outcomes(order, logs, stopped, processes.oom_kills() > oom_before)
        failed_here = start_error is not None or any(outcome.state in ("failed", "stopped") for outcome in outcomes)
        self._run_failed = failed_here or not self._ranks.passed
        return NodeReport(
            node.node_rank,
            node.host,
            outcomes,
            start_error,
            self._times,
            tuple(self._warnings),
            self._gave_up,
            order.placement,
        )

    def _warn_of_losses(self, order: NodeOrder) -> None:
        """Warn of ranks that were killed after the grace period, and of new files that go with the node's folder."""
        killed = [
            order.plan.node.first_rank + local_rank
            for local_rank, exit in sorted(self._ranks.exits.items())
            if exit.stopped and exit.code == -signal.SIGKILL
        ]
        if killed:
            self._warnings.append(
                f"killed {who(killed)}, which had not ended {self._job.grace_period:g} s after SIGTERM: raise "
                "grace_period if that was too early to save"
            )
        shipped = None if self._job.working_dir is None or self._order.on_driver else self._job.working_dir.archive
        if shipped is not None and order.cwd is not None:
            new = project.new_files(shipped, Path(order.cwd))
            if new:
                self._warnings.append(
                    f"removes what ranks have written into its copy of working_dir: {', '.join(new[:_NEW_FILES])}"
                    f"{', ...' * (len(new) > _NEW_FILES)}. Write to an absolute path on storage that stays"
                )

    async def _open_channel(self, order: NodeOrder, logs: Tailing) -> None:
        """Connect to the driver. If it cannot be reached, the run goes on without the channel.

        Raises:
            StartError: the driver was reached earlier in this run and now refuses the connection: the run has ended.
        """
        if self._channel is not None:
            dial: Dial = over_socket(self._channel)
            at = "its socket"
        elif self._order.endpoint is not None:
            endpoint = Endpoint(*self._order.endpoint)
            dial = over_tls(endpoint)
            at = f"{endpoint.host}:{endpoint.port}"
        else:
            return
        interval = min(_BEAT_INTERVAL, self._job.heartbeat_timeout / 6)
        if self._job.stall_timeout is not None:
            interval = min(interval, self._job.stall_timeout / 4)
        uplink = Uplink(
            dial,
            messages.Hello(self._order.executor, order.placement.nodes),
            on_order=self._on_order,
            on_offsets=logs.driver_has,
            on_lost=self._on_driver_lost,
            status=self._status,
            timeout=self._job.heartbeat_timeout,
            interval=interval,
            redial=self._channel is None,
        )
        try:
            await uplink.open()
        except OSError as error:
            if self._order.reached and isinstance(error, ConnectionRefusedError):
                raise errors.StartError(f"nobody listens at {at} any more: the run has ended") from None
            self._warnings.append(
                f"{frames.UNREACHED} at {at} ({error}): no live log lines from there; results and errors still arrive"
            )
            return
        self._uplink = uplink
        if self._warnings:
            self._tell(messages.Warnings(order.host, tuple(self._warnings)))
        logs.ship_to(uplink)

    async def _close_channel(self) -> None:
        """Close the channel, and note whether the driver knows of a failure."""
        if self._uplink is not None:
            bye = await self._unless_orphaned(self._uplink.close())
            self._run_failed = self._run_failed or (bye is not None and bye.failed)

    async def _unless_orphaned(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Wait for the driver to do its part, but not for long once the owner is gone: the driver may be gone too."""
        working, orphaned = asyncio.ensure_future(work), asyncio.ensure_future(self._owner_gone.wait())
        await asyncio.wait({working, orphaned}, return_when=asyncio.FIRST_COMPLETED)
        orphaned.cancel()
        if not working.done():
            await asyncio.wait({working}, timeout=_ORPHAN_PATIENCE)
        if not working.done():
            working.cancel()
            return None
        return working.result()

    async def _follow_events(self, descriptor: int, order: NodeOrder) -> None:
        """Read the launcher's events until the launcher ends, which closes the pipe."""
        reader = asyncio.StreamReader(limit=1 << 24)  # an event may hold a long traceback
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
        )
        while line := await reader.readline():
            event = messages.decode(json.loads(line))
            self._ranks.note(event)
            if isinstance(event, messages.LauncherReady):
                self._times["ready"] = event.time
                if isinstance(self._launcher, SpawnedLauncher):
                    self._tell_importing(order, "")
            elif isinstance(event, messages.RanksStarted):
                self._times["started"] = event.time
                if self._job.stall_timeout is not None:
                    self._activity = activity.Activity(self._ranks.pids)
                self._tell(messages.Started())
            elif isinstance(event, messages.LauncherWarning):
                self._warnings.append(event.text)
                self._tell(messages.Warnings(order.host, (event.text,)))
            elif isinstance(event, messages.RankExited) and event.code != 0 and not event.stopped:
                failure = self._failure(order, event.local_rank, "", False)
                self._tell(messages.Failed(replace(failure, exception=None)))
        transport.close()

    def _tell(self, message: messages.Message) -> None:
        if self._uplink is not None:
            try:
                self._uplink.tell(message)
            except frames.ProtocolError:  # the traceback has megabytes; it still arrives with the report
                self._uplink.tell(messages.Failed())

    def _tell_importing(self, order: NodeOrder, module: str) -> None:
        self._tell(messages.Importing(self._order.executor, len(order.placement.nodes), module))

    def _status(self) -> messages.Beat:
        """Return a heartbeat: how many ranks are alive, and for how many seconds they have been idle."""
        alive = len(self._ranks.alive_pids)
        if self._activity is None or self._tailing is None or not alive:
            return messages.Beat(alive)
        return messages.Beat(alive, self._activity.look(self._tailing.seen))

    def _on_order(self, order: messages.Message) -> None:
        if isinstance(order, messages.Stop):
            if order.grace and self._dumps:
                self._stopping_soon = asyncio.ensure_future(self._stop_after(set(self._dumps)))
            else:
                self._stop(grace=order.grace)
        elif isinstance(order, messages.Dump):
            pids = self._ranks.alive_pids
            before = activity.ask_stacks(Path(self._order.folder), pids, order.all_threads)
            dump = asyncio.ensure_future(self._dump(order.number, pids, before, order.timeout))
            self._dumps.add(dump)
            dump.add_done_callback(self._dumps.discard)

    async def _stop_after(self, dumps: set[asyncio.Task[None]]) -> None:
        """Stop the ranks once pending requests for stacks are answered, or after :data:`_LAST_WORDS` seconds."""
        await asyncio.wait(dumps, timeout=_LAST_WORDS)
        self._stop()

    async def _dump(self, number: int, pids: Mapping[int, int], before: Mapping[int, int], timeout: float) -> None:
        """Send the stacks that each rank was asked for."""
        assert self._node is not None
        texts = dict.fromkeys(self._ranks.exits, "it has ended")
        texts |= await activity.stacks(Path(self._order.folder), pids, before, timeout)
        for local_rank, text in texts.items():
            if self._uplink is not None:
                self._uplink.send(messages.Stacks(number, self._node.first_rank + local_rank, text))

    def _on_driver_lost(self) -> None:
        """Stop sending logs, as the channel is gone for good. Outside local mode, stop the ranks too."""
        if self._tailing is not None:
            self._tailing.stop_shipping()
        if self._channel is None and self._ranks.alive:  # in local mode, the end of the driver's process tells more
            self._gave_up = f"heard nothing from the driver for {self._job.heartbeat_timeout:g} s"
            self._stop()

    def _on_owner_gone(self) -> None:
        self._tell(messages.Orphaned())
        self._owner_gone.set()
        self._stop()

    def _on_control(self) -> None:
        """Treat the control line as closed: after the first message, only its end can arrive."""
        asyncio.get_running_loop().remove_reader(self._control)
        self._on_owner_gone()

    def _stop(self, *, grace: bool = True) -> None:
        """Make the launcher stop its ranks within the grace period. Without grace or living ranks, kill it at once."""
        if self._stopping and grace:
            return
        self._stopping = True
        if self._ranks.alive and grace:
            self._launcher.send_signal(signal.SIGTERM)
            loop = asyncio.get_running_loop()
            self._backstop = loop.call_later(self._job.grace_period + _STOP_MARGIN, self._launcher.kill)
        else:
            self._launcher.kill()

    def _outcomes(self, order: NodeOrder, logs: Tailing, stopped: bool, oom: bool) -> tuple[Outcome, ...]:
        node = order.plan.node
        if not self._ranks.started:
            return ()
        outcomes = []
        for local_rank in range(node.local_world_size):
            global_rank = node.first_rank + local_rank
            told = _read_outcome(order, local_rank)
            exit = self._ranks.exits.get(local_rank)
            if exit is None or exit.code != 0:
                tail = logs.tails.get(global_rank, b"").decode(errors="replace")
                failed = told is not None and told.state == "failed"
                by_us = stopped if exit is None else exit.stopped
                if by_us and not failed:  # a rank that had already returned was about to end anyway
                    outcomes.append(told or Outcome(global_rank, node.host, "stopped"))
                else:
                    failure = self._failure(order, local_rank, tail, oom)
                    outcomes.append(Outcome(global_rank, node.host, "failed", failure))
            elif told is not None:
                outcomes.append(told)
            elif isinstance(order.plan.target, Function):
                failure = Failure(
                    global_rank,
                    local_rank,
                    node.host,
                    "exit",
                    "exited with code 0 before the function returned (os._exit?)",
                    exit_code=0,
                    time=exit.time,
                )
                outcomes.append(Outcome(global_rank, node.host, "failed", failure))
            else:
                outcomes.append(Outcome(global_rank, node.host, "finished"))
        return tuple(outcomes)

    def _failure(self, order: NodeOrder, local_rank: int, tail: str, oom: bool) -> Failure:
        """Return why a rank failed: what the rank itself wrote, completed by how its process ended."""
        node = order.plan.node
        told = _read_outcome(order, local_rank)
        exit = self._ranks.exits.get(local_rank)
        if told is not None and told.failure is not None and told.state == "failed":
            failure = told.failure
        elif exit is None:
            failure = Failure(
                node.first_rank + local_rank,
                local_rank,
                node.host,
                "lost",
                "went down with the process that started it",
                time=time.time(),
            )
        else:
            failure = Failure(
                node.first_rank + local_rank,
                local_rank,
                node.host,
                *_describe_exit(exit.code, oom),
                time=exit.time,
            )
        # If a rank that had failed was told to stop on its way out, its failure is still the reason.
        if exit is not None and not exit.stopped:
            failure = replace(
                failure,
                exit_code=exit.code if exit.code >= 0 else None,
                signal=processes.signal_name(-exit.code) if exit.code < 0 else None,
            )
        return replace(
            failure,
            traceback=self._as_on_driver(failure.traceback, order),
            log_tail=self._as_on_driver(tail, order),
        )

    def _as_on_driver(self, text: str, order: NodeOrder) -> str:
        """Return a text with the paths of shipped files replaced by those on the driver."""
        job = self._job
        if self._order.on_driver:
            return text
        if isinstance(job.target, Script):
            text = text.replace(str(layout.script(order.folder, job.target)), job.target.path)
        if job.working_dir is not None:
            text = text.replace(f"{order.cwd}/", f"{job.working_dir.path}/")
        return text


def _explain(error: Exception) -> tuple[str, str]:
    """Return what a node reports when it cannot start: this package's errors as they are, others with a traceback."""
    if isinstance(error, errors.DistributorError):
        return type(error).__name__, str(error)
    text = "".join(traceback.format_exception(error))
    return "StartError", f"the agent on {socket.gethostname()} failed: {type(error).__name__}: {error}\n\n{text}"


def _describe_exit(code: int, oom: bool) -> tuple[str, str]:
    """Return the kind and message of a process's end without an exception."""
    if code >= 0:
        return "exit", f"exited with code {code}"
    name = processes.signal_name(-code)
    if -code == signal.SIGKILL and oom:
        return "signal", (
            f"killed by {name}, most likely for lack of memory: the kernel's out-of-memory killer was at work "
            "meanwhile. Use smaller batches or fewer ranks per node, or give the executor more memory"
        )
    return "signal", f"killed by {name}"


def _read_outcome(order: NodeOrder, local_rank: int) -> Outcome | None:
    try:
        outcome: Outcome = pickle.loads(layout.outcome(order.folder, local_rank).read_bytes())
        return outcome
    except FileNotFoundError:
        return None


async def _reap_orphans(launcher: int) -> None:
    """Reap adopted processes, which would otherwise stay zombies for the whole training."""
    while True:
        await asyncio.sleep(1.0)
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_pid != launcher:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _watch_process(loop: asyncio.AbstractEventLoop, pid: int, callback: Any) -> int | None:
    """Call back when a process ends, and return the descriptor that is watched.

    Returns ``None`` if the process has already ended, and the callback then runs at once. Also returns ``None`` if the
    kernel has no process descriptors. Then only the end of the control line shows that the process has ended.
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
