"""The driver's side of the channel: one thread with an event loop serves all nodes of a job."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from distributor.channel import frames
from distributor.channel.facts import Facts
from distributor.channel.failed_reports import FailedReports
from distributor.channel.listener import TlsListener, widen
from distributor.channel.proof import SEAL_BYTES
from distributor.channel.result_receiver import ResultReceiver
from distributor.channel.tasks import among
from distributor.channel.transfers import FileSink, Transfers
from distributor.channel.validation import Validation
from distributor.values import messages, outcome
from distributor.values.messages import Message, Offset, Placed, TaskFacts
from distributor.values.placement import Placement
from distributor.values.plan import Endpoint

RETURN_WINDOW = 3.0  # seconds to reconnect; until then, a node's end looks like that of its connection

_FACTS_TIMEOUT = 10.0  # seconds without a further task's facts until missing tasks count as unable to reach the driver

#: The same where nodes have reached the driver before: a missing task may be on a host that has died. Spark notices it
#: within ``spark.network.timeout``, 120 seconds, and would end the executors of all tasks that wait in ``allGather``.
LATER_FACTS_TIMEOUT = 150.0

_LONGEST_GATHER = 300.0  # seconds until a task that has not come counts as lost

#: Seconds for the first message, and for closing after the driver has closed its end.
_FIRST_TIMEOUT = 10.0
_LINGER = 10.0

_NOTICE = 2.0  # seconds until the driver notices the end of a socket pair's other process

_DISMISSAL = 1.0  # seconds for nodes to close their connections after the job's end

_TURN = 64  # frames read from a connection before others get their turn

_MOST_UNREAD = frames.MAX_BODY  # bytes that wait because the other side does not read; beyond, the connection ends

#: Names the asyncio tasks that outlive the job, see :meth:`ChannelServer.retire`.
_HOLDING = "holding"

_AGAIN = "Spark has started the tasks again"

_LONGEST_REASON = 2000  # characters; every node gets the reason

T = TypeVar("T")

#: Returns the answer to each task, by partition, and the placement; ``None`` if the tasks must end.
Place = Callable[[Sequence[TaskFacts]], tuple[Sequence[Placed], Placement | None] | None]


class Listener(Protocol):
    """Receives nodes' messages, in the channel's thread."""

    def on_log(self, log: outcome.Log) -> None: ...

    def on_message(self, node: str, message: Message) -> None:
        """Take a message. ``AllNodes`` comes from the channel itself, once an agent has connected."""

    def on_lost(self, node: str, why: str) -> None: ...

    def offsets(self, node: str) -> tuple[Offset, ...]:
        """Return how many bytes of each output stream of the node's ranks have arrived."""


@dataclass
class _Peer:
    """A node whose hello the driver has accepted, with its newest connection."""

    writer: asyncio.StreamWriter
    heard: float
    leaving: asyncio.TimerHandle | None = None

    def stay(self) -> None:
        if self.leaving is not None:
            self.leaving.cancel()


@dataclass
class _Standing:
    """Orders that a node gets even if it connects later."""

    stop: messages.Stop | None = None
    next: messages.Begin | messages.End | None = None


class ChannelServer:
    """The driver's end of the channel for one job. Leaving its context ends all connections and the thread.

    A node is lost after ``timeout`` seconds of silence. The default guard does not check nodes and ranks. Once no
    further task has sent facts for ``facts_timeout`` seconds, by default ten, tasks use ``allGather``.
    """

    def __init__(
        self,
        listener: Listener,
        timeout: float = 30.0,
        tasks: int = 0,
        guard: Validation | None = None,
        file_sink: FileSink | None = None,
        facts_timeout: float | None = None,
    ) -> None:
        self._listener = listener
        self._facts_timeout = _FACTS_TIMEOUT if facts_timeout is None else facts_timeout
        self._guard = Validation(tasks=tasks) if guard is None else guard
        self._timeout = timeout
        self._facts = Facts(tasks, self._answers)
        self._place: Place = lambda facts: (among(facts), None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="distributor-channel", daemon=True)
        self._peers: dict[str, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._standing = _Standing()
        self._tls_listener = TlsListener(partial(self._serve, window=RETURN_WINDOW), tasks)
        self.returns = Transfers(ResultReceiver(), file_sink)  # reports and return values
        self.failed_reports = FailedReports()
        self.reached = False  # a task or a node has reached the driver at some time

    @property
    def address(self) -> str | None:
        return self._tls_listener.address

    @property
    def receiver(self) -> ResultReceiver:
        """Receives return values that are too large for a node's final message."""
        return self.returns.receiver

    @property
    def begun(self) -> bool:
        """Whether nodes may have started because of the driver's answer, be it facts or the order to use ``allGather``.

        If no task reaches the driver, nodes start too, but this stays ``False``.
        """
        return self._facts.begun or self._facts.given_up

    @property
    def exchanged(self) -> bool:
        """Whether tasks may have got the facts from the driver: such tasks do not wait for others in ``allGather``."""
        return self._facts.begun

    @property
    def gathering(self) -> bool:
        """Whether tasks may wait in ``allGather`` for one that has not come, such as one that unpacks an archive."""
        since = self._facts.gather_since
        return since is not None and not self.reached and time.monotonic() - since < _LONGEST_GATHER

    @property
    def told(self) -> int:
        """The number of connected tasks that have sent facts."""
        return self._facts.told

    def __enter__(self) -> ChannelServer:
        self._thread.start()
        self._call(self._start(self._watch_silence())).result()
        return self

    def retire(self) -> None:
        """Stop listening, and end all connections but those of nodes that keep states for the next job.

        These stay until the run ends: a node removes its states when its connection ends.
        """
        self._call(self._end_tasks(staying=_HOLDING)).result()

    def __exit__(self, *_: object) -> None:
        self._call(self._end_tasks()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self, bind: str, advertise: str, ports: tuple[int, int] | None = None) -> Endpoint:
        """Listen for nodes at ``bind``, on a port of ``ports``, and tell them to connect to ``advertise``.

        OSError if the address is not this machine's, no port is free, or the TLS key cannot be written to a file.
        """
        endpoint = self._tls_listener.listen(bind, advertise, ports)
        self._call(self._start(self._tls_listener.accept(self._start))).result()
        return endpoint

    def seal(self) -> bytes:
        """Make a new seal: from now on, nodes need secrets made from it (:mod:`distributor.channel.proof`)."""
        self._guard.seal = secrets.token_bytes(SEAL_BYTES)
        return self._guard.seal

    def returned(self, patience: float) -> outcome.Collected | None:
        """Wait for the results of all nodes.

        ``None`` if some cannot arrive, for example because a rank has failed, or nothing arrives for ``patience``
        seconds.
        """
        return self._call(self.returns.wait(lambda: self._guard.names, self._expects_nothing, patience)).result()

    def forget_returned(self) -> None:
        """Free the memory of results."""
        self._call(self.returns.clear()).result()

    def attach(self, sock: socket.socket) -> None:
        """Serve a node that inherits the other end of a socket pair, and close this end later."""
        self._call(self._serve_socket(sock)).result()

    def hear(self, node: str, message: Message) -> None:
        """Give the listener a message about a node that is not connected yet."""
        with suppress(RuntimeError):  # the run has just ended, so the event loop is closed
            self._loop.call_soon_threadsafe(self._listener.on_message, node, message)

    def await_loss(self, node: str) -> None:
        """Wait, at most :data:`_NOTICE` s, until the listener knows that a node whose process has ended is lost."""
        end = time.monotonic() + _NOTICE
        while node in self._peers and time.monotonic() < end:
            time.sleep(0.01)
        self._call(asyncio.sleep(0)).result()  # wait for the event loop to end a call of the listener

    def place_by(self, place: Place) -> None:
        """Set what places the ranks once all facts are there."""
        self._place = place

    def _answers(self, facts: Sequence[TaskFacts]) -> list[list[bytes]] | None:
        placed = self._place(facts)
        if placed is None:
            return None
        answers, placement = placed
        common = []
        if placement is not None and (share := answers[0].share) is not None:
            self._guard.place(placement, share.digest)
            common = [frames.pack(messages.AllNodes(placement.nodes))] if answers[0].all_nodes else []
        return [[frames.pack(answer), *common] for answer in answers]

    def start_again(self) -> bool:
        """Return whether the tasks were refused, and forget it.

        Afterwards, the driver collects the facts of the tasks that Spark starts in their place.
        """
        return self._facts.start_again()

    def stop(self, reason: str, *, grace: bool = True, hasty: bool = False) -> None:
        """Order all nodes to stop, also those that connect later.

        Without ``grace``, ranks are killed at once, and a grace period that has begun ends. ``hasty`` says that another
        attempt waits: nodes then kill each rank as soon as it is not writing a file.
        """
        with suppress(RuntimeError):  # the run has just ended, so the event loop is closed
            self._loop.call_soon_threadsafe(self._order_stop, messages.Stop(reason[:_LONGEST_REASON], grace, hasty))

    def begin(self, attempt: int, port: int) -> None:
        """Order all nodes to begin an attempt, whose ranks meet at ``port`` of node 0. Revokes an order to stop."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._order_next, messages.Begin(attempt, port))

    def end(self) -> None:
        """Tell all nodes, also those that connect again later, that no attempt follows."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._order_next, messages.End())

    @property
    def stop_reason(self) -> str:
        return "" if self._standing.stop is None else self._standing.stop.reason

    def order(self, order: Message) -> None:
        """Send an order to the nodes that are connected now."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send_all, order)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve_socket(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        await self._start(self._serve(reader, writer, window=0.0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: float) -> None:
        """Read one connection until it ends. Its node is lost unless it reconnects within ``window`` seconds.

        If the network broke the connection and ``window`` is not 0, the node has ``timeout`` instead.
        """
        node, why = None, "its agent ended without giving a reason"
        try:
            async with asyncio.timeout(_FIRST_TIMEOUT if window else None):
                first = await frames.read(reader, self._guard.first_limit)
            if isinstance(first, messages.Hello):
                node = self._welcome(first, writer)
                await self._follow(node, reader, writer)
            elif first is not None:
                await self._serve_task(first, reader, writer)
        except frames.CutError:
            pass
        except OSError:  # the network broke the connection: allow the node more time to reconnect
            window = self._timeout if window else 0.0
        except (frames.ProtocolError, KeyError, TypeError, ValueError) as error:
            why = f"it sent an invalid message ({error})"
            self._refuse(writer, f"sent an invalid message ({error})")
        except BaseException:  # cancelled: the server closes, or Door ends the connection
            writer.transport.abort()
            raise
        if node is not None and (peer := self._peers.get(node)) is not None and peer.writer is writer:
            peer.leaving = self._loop.call_later(window, self._lose, node, why)
        await _end(writer)

    async def _serve_task(
        self, message: Message | outcome.Log, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a connection that begins not with a hello, but with facts, a return value or a file, for example."""
        match message:
            case TaskFacts():
                self._guard.check_facts(message)
                self.reached = True
                await self._exchange(message, reader, writer)
            case messages.Importing():
                self._guard.check_importing(message)
                self.reached = True
                self._tell(self._listener.on_message, message.node, message)  # the node's agent has not connected yet
            case messages.Value() if self._standing.stop is not None:
                self._send(writer, self._standing.stop)
            case messages.Value():
                self._guard.check_value(message)
                self._tls_listener.admit()
                widen(writer)
                await self.receiver.receive(message, writer)
            case messages.Upload() if (file_sink := self.returns.file_sink) is not None:
                node = self._guard.check_node(message)
                self._tls_listener.admit()
                widen(writer)
                await file_sink.receive(message, node, reader, writer)
            case messages.Fetch() if (file_sink := self.returns.file_sink) is not None:
                self._guard.check_node(message)
                self._tls_listener.admit()
                await file_sink.give(writer)
            case messages.FailedReport():
                self._guard.check_failed_report(message)
                self._tls_listener.admit()
                await self.failed_reports.receive(message, reader, writer)
            case messages.HeldStates():
                self._guard.check_node(message)
                self._tls_listener.admit()
                cast("asyncio.Task[None]", asyncio.current_task()).set_name(_HOLDING)
                await reader.read(1)  # wait until the node has ended
            case messages.Delete() if (file_sink := self.returns.file_sink) is not None:
                node = self._guard.check_node(message)
                self._tls_listener.admit()
                await file_sink.delete(message, node, writer)
            case _:
                raise frames.ProtocolError(f"no connection of this run begins with a {type(message).__name__} message")

    async def _follow(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a node's messages until it says good-bye, or its connection ends or is replaced."""
        turn = 0
        while (message := await frames.read(reader)) is not None:
            peer = self._peers.get(node)
            if peer is None or peer.writer is not writer:
                return
            peer.heard = self._loop.time()
            if self._guard.passes(node, message):
                if isinstance(message, outcome.Log):
                    self._tell(self._listener.on_log, message)
                elif isinstance(message, messages.Finished):
                    self.returns.note(node, message)
                else:
                    self._tell(self._listener.on_message, node, message)
            if isinstance(message, messages.Beat):
                self._send(writer, messages.BeatHeard(self._listener.offsets(node)))
                await writer.drain()  # do not keep writing to a node that never reads
            if isinstance(message, messages.Bye):
                stopped = self._standing.stop is not None
                if node in self.returns and not stopped:
                    self.failed_reports.release()  # the node has succeeded, and its results come through Spark
                self._send(writer, messages.Farewell(self._listener.offsets(node), stopped))
                del self._peers[node]
                return
            turn += 1
            if turn % _TURN == 0:
                await asyncio.sleep(0)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        """Call the listener. If it raises, the driver has failed, and not the node."""
        try:
            call(*arguments)
        except Exception as error:  # such as an exception of a handler of the user's log, which may raise another one
            with suppress(Exception):
                text = "the driver failed to take a message of a node"
                self._loop.call_exception_handler({"message": text, "exception": error})

    async def _exchange(self, message: TaskFacts, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep a task's facts while it is connected, and answer once all have arrived or cannot arrive.

        A task that is new after an agent has connected must stop at once.
        """
        facts = self._facts
        if facts.over and not facts.knows(message):
            self._send(writer, messages.Stop(_AGAIN))
            return
        if self._standing.stop is not None:
            self._send(writer, self._standing.stop)
        try:
            is_new = facts.take(writer, message)
            self._tls_listener.admit()
            if facts.fallback is not None and (is_new or facts.settled):
                facts.fallback.cancel()
                facts.fallback = None
            if facts.fallback is None and not (facts.settled or facts.given_up):
                facts.fallback = self._loop.call_later(self._facts_timeout, self._give_facts_up)
            self._answer_facts()
            if await reader.read(1):  # wait until the task has its answer, or has ended
                raise frames.ProtocolError("the task sends more data after its facts (address, GPUs and more)")
        finally:
            facts.forget(writer)

    def _give_facts_up(self) -> None:
        """Let all tasks use ``allGather``, since some cannot reach the driver; or stop the run if it has begun.

        In a run that has begun, the missing facts are of tasks that Spark started again after it lost one. But the
        driver alone decides whether ranks start again.
        """
        if self._facts.begun:
            self._order_stop(messages.Stop(_AGAIN))
            return
        self._facts.gather_since = time.monotonic()
        self._answer_facts()

    def _answer_facts(self) -> None:
        if self._facts.settled or self._facts.given_up:
            for writer in self._facts.waiting():
                self._write(writer, *self._facts.answer(writer))

    def _welcome(self, message: messages.Hello, writer: asyncio.StreamWriter) -> str:
        """Register a node's connection, in place of an older one."""
        node = message.node
        try:
            self._guard.admit(message)
        except frames.ProtocolError:
            if self._standing.stop is not None:  # perhaps Spark has started the task again: the task must not begin
                self._send(writer, self._standing.stop)
                self._send(writer, messages.Farewell((), True))
            raise
        self._tls_listener.admit()
        self.reached = True
        self._facts.over = self._facts.over or bool(message.digest)
        before = self._peers.get(node)
        self._peers[node] = _Peer(writer, self._loop.time())
        if before is not None:
            before.stay()
            before.writer.close()
        self._tell(self._listener.on_message, node, message)
        if message.digest and (placement := self._guard.placement) is not None:
            self._tell(self._listener.on_message, node, messages.AllNodes(placement.nodes))
        self._send(writer, messages.Welcome(self._listener.offsets(node)))
        for order in (self._standing.next, self._standing.stop):
            if order is not None:
                self._send(writer, order)
        return node

    async def _watch_silence(self) -> None:
        interval = self._timeout / 10
        while True:
            before = self._loop.time()
            await asyncio.sleep(interval)
            now = self._loop.time()
            if now - before > interval + self._timeout / 2:  # this machine was asleep: messages of nodes are unread
                for peer in self._peers.values():
                    peer.heard = now
            for node, peer in list(self._peers.items()):
                if now - peer.heard > self._timeout:
                    self._lose(node, f"nothing was heard from it for {self._timeout:g} s")

    def _expects_nothing(self) -> bool:
        """Return whether no more results can arrive."""
        return self._standing.stop is not None or not (self._peers or self.returns)

    def _lose(self, node: str, why: str) -> None:
        if (peer := self._peers.pop(node, None)) is not None:
            peer.stay()
            peer.writer.transport.abort()
            self._guard.forget(node)
            if node not in self.failed_reports:
                self.failed_reports.release()
            self._listener.on_lost(node, why)

    def _order_stop(self, order: messages.Stop) -> None:
        stop = self._standing.stop
        if stop is None or (stop.grace and (not order.grace or (order.hasty and not stop.hasty))):
            self._standing.stop = order
            self._send_all(order)
            self.receiver.abort()  # the agents connect again, and then get the order to stop
            frame = frames.pack(order)
            for writer in self._facts.waiting():
                self._write(writer, frame)

    def _order_next(self, order: messages.Begin | messages.End) -> None:
        if order == self._standing.next:
            return
        if isinstance(order, messages.Begin):
            self._standing.stop = None
        self._standing.next = order
        self._send_all(order)

    def _send_all(self, order: Message) -> None:
        frame = frames.pack(order)
        for peer in self._peers.values():
            self._write(peer.writer, frame)

    def _send(self, writer: asyncio.StreamWriter, message: Message) -> None:
        self._write(writer, frames.pack(message))

    def _write(self, writer: asyncio.StreamWriter, *data: bytes) -> None:
        if writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > _MOST_UNREAD:
            self._refuse(writer, "does not read what the driver sends")
            return
        for frame in data:
            writer.write(frame)

    def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        address = writer.get_extra_info("peername")
        self._guard.log(address[0] if address else "this machine", why)
        writer.transport.abort()

    async def _end_tasks(self, staying: str | None = None) -> None:
        """End all asyncio tasks but those named ``staying``, and stop listening.

        Connected nodes are told. Otherwise they would try to reconnect until Spark kills their tasks, and the next job
        would wait for the slots of these tasks.
        """
        self._order_stop(messages.Stop("the job has ended"))
        self._order_next(messages.End())
        peers, self._peers = self._peers, {}
        for node, peer in peers.items():
            peer.stay()
            self._send(peer.writer, messages.Farewell(self._listener.offsets(node), True))
        await _await_closing([peer.writer for peer in peers.values()])
        tasks = [task for task in self._tasks if task.get_name() != staying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tls_listener.close()
        await asyncio.sleep(0)  # transports close in the next round of the event loop


async def _await_closing(writers: Sequence[asyncio.StreamWriter]) -> None:
    """Wait for nodes to close their connections, at most :data:`_DISMISSAL` seconds, and end those still open."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _DISMISSAL
    while loop.time() < end and not all(writer.is_closing() for writer in writers):
        await asyncio.sleep(0.01)
    for writer in writers:
        writer.transport.abort()


async def _end(writer: asyncio.StreamWriter) -> None:
    """Close a connection once the other side has read all, or after :data:`_LINGER` seconds.

    A connection without a valid first message stays unauthenticated meanwhile.
    """
    writer.close()
    try:
        with suppress(OSError):  # OSError includes TimeoutError
            async with asyncio.timeout(_LINGER):
                await writer.wait_closed()
    finally:
        writer.transport.abort()
