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
from distributor.channel.door import Door
from distributor.channel.facts import Facts
from distributor.channel.guard import Guard
from distributor.channel.intake import Intake
from distributor.channel.proof import SEAL_BYTES
from distributor.channel.returns import Depository, Returns
from distributor.values import messages, outcome
from distributor.values.messages import Message, Offset
from distributor.values.plan import Endpoint

#: Seconds that a node may take to reconnect after its connection was closed. Until then, the driver cannot tell whether
#: the node has ended or only its connection.
RETURN_WINDOW = 3.0

#: Seconds that the driver waits for the facts (address, GPUs and more) of all tasks, once the first task has sent its
#: facts. Then the driver assumes that the other tasks cannot reach it.
_FACTS_TIMEOUT = 10.0

#: Seconds that a connection may take to send its first message, and to close after the driver has closed its end.
_FIRST_TIMEOUT = 10.0
_LINGER = 10.0

#: Maximum number of seconds until the driver notices that a process at the other end of a socket pair has ended.
_NOTICE = 2.0

#: Seconds that nodes may take to close their connections after the driver has told them that the job has ended.
_DISMISSAL = 1.0

#: Number of frames (messages) that the driver reads from one connection before other connections get their turn.
_TURN = 64

#: Maximum number of bytes that may wait to be sent over a connection because the other side does not read. If there are
#: more, the driver ends the connection.
_MOST_UNREAD = frames.MAX_BODY

#: The name of the asyncio tasks that serve nodes which keep the states of ranks (checkpoints in memory) for the run's
#: next job. These asyncio tasks go on when the job ends; see :meth:`ChannelServer.retire`.
_HOLDING = "holding"

#: The reason that the driver gives when it stops tasks that Spark has started again after the run had begun.
_AGAIN = "Spark has started the tasks again"

#: Maximum number of characters of the reason for a stop, which is sent to every node.
_LONGEST_REASON = 2000

T = TypeVar("T")


class Listener(Protocol):
    """The receiver of nodes' messages; its methods are called in the channel's thread."""

    def on_log(self, log: outcome.Log) -> None: ...

    def on_message(self, node: str, message: Message) -> None: ...

    def on_lost(self, node: str, why: str) -> None: ...

    def offsets(self, node: str) -> tuple[Offset, ...]:
        """Return how many bytes of each output stream of the node's ranks have arrived."""


@dataclass
class _Peer:
    """A node from which the driver has accepted a hello, the first message of a node's connection.

    ``writer`` is the node's newest connection. ``heard`` is the time of the node's last message. ``leaving`` is the
    timer after which a node whose connection has ended counts as lost.
    """

    writer: asyncio.StreamWriter
    heard: float
    leaving: asyncio.TimerHandle | None = None

    def stay(self) -> None:
        """Stop the timer after which the node counts as lost."""
        if self.leaving is not None:
            self.leaving.cancel()


@dataclass
class _Standing:
    """The driver's latest orders to nodes, which a node gets even if it connects later.

    ``stop`` is the order to stop the ranks. ``next`` is the order to begin another attempt, or to end.
    """

    stop: messages.Stop | None = None
    next: messages.Begin | messages.End | None = None


class ChannelServer:
    """The driver's end of the channel, which serves all nodes of one job of a run.

    Use the server as a context manager: leaving the context ends every connection and the server's thread.

    Args:
        listener: receives the nodes' messages.
        timeout: number of seconds of silence after which a node counts as lost.
        tasks: number of tasks that exchange facts (address, GPUs and more) before the nodes start.
        guard: decides which messages of nodes are accepted; the default guard does not check which nodes and ranks the
            run has.
        depository: keeps the ranks' new files in ``output_dir``; ``None`` if the run has no ``output_dir``.
    """

    def __init__(
        self,
        listener: Listener,
        timeout: float = 30.0,
        tasks: int = 0,
        guard: Guard | None = None,
        depository: Depository | None = None,
    ) -> None:
        self._listener = listener
        self._guard = Guard(tasks=tasks) if guard is None else guard
        self._timeout = timeout
        self._facts = Facts(tasks)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="distributor-channel", daemon=True)
        self._peers: dict[str, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._standing = _Standing()
        self._door = Door(partial(self._serve, window=RETURN_WINDOW), tasks)
        #: The results of nodes (reports and return values) that come over the channel.
        self.returns = Returns(Intake(), depository)
        #: Whether a task or a node has ever reached the driver.
        self.reached = False

    @property
    def address(self) -> str | None:
        """The address ``host:port`` to which nodes connect; ``None`` until the server listens for nodes."""
        return self._door.address

    @property
    def intake(self) -> Intake:
        """Receives, over separate connections, return values that are too large for a node's final message."""
        return self.returns.intake

    @property
    def begun(self) -> bool:
        """Whether nodes may have started because of the driver's answer to tasks.

        Nodes may have started if the driver has sent the facts (address, GPUs and more) of all tasks to the tasks, or
        has told the tasks to exchange facts through Spark's ``allGather``. If no task has sent its facts to the driver,
        for example because no task can reach it, nodes start too, but this property stays ``False``.
        """
        return self._facts.begun or self._facts.given_up

    @property
    def exchanged(self) -> bool:
        """Whether tasks may have got the facts (address, GPUs and more) of all tasks from the driver.

        A task that has got the facts of all tasks from the driver does not wait for the other tasks in Spark's
        ``allGather``.
        """
        return self._facts.begun

    @property
    def told(self) -> int:
        """The number of connected tasks that have sent their facts (address, GPUs and more)."""
        return self._facts.told

    def __enter__(self) -> ChannelServer:
        self._thread.start()
        self._call(self._start(self._watch_silence())).result()
        return self

    def retire(self) -> None:
        """Stop listening, and end all connections except those of nodes that keep states for the next job.

        A state is what a rank has saved in memory as a checkpoint. The connections of nodes that keep states stay open
        until the server closes, at the end of the run. When a node's connection ends, the node removes its states.
        """
        self._call(self._end_tasks(staying=_HOLDING)).result()

    def __exit__(self, *_: object) -> None:
        self._call(self._end_tasks()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self, bind: str, advertise: str, ports: tuple[int, int] | None = None) -> Endpoint:
        """Start to listen for nodes.

        Args:
            bind: the address at which the server listens. Schedulers pass the driver's address in Spark, or
                ``spark.driver.bindAddress`` if it is set.
            advertise: the address to which nodes connect.
            ports: first and last port to try; any free port by default.

        Raises:
            OSError: the address ``bind`` does not belong to this machine, none of the ports is free, or the TLS key
                cannot be written to a temporary file.
        """
        endpoint = self._door.listen(bind, advertise, ports)
        self._call(self._start(self._door.accept(self._start))).result()
        return endpoint

    def seal(self) -> bytes:
        """Make and return a new seal, the random key from which tasks make the secrets of their nodes.

        From now on, a node can connect only with a secret that was made from the new key, the seal; see
        :mod:`distributor.channel.proof`.
        """
        self._guard.seal = secrets.token_bytes(SEAL_BYTES)
        return self._guard.seal

    def returned(self, patience: float) -> outcome.Collected | None:
        """Wait until the results of all nodes have arrived over the channel, and return these results.

        Args:
            patience: number of seconds to wait while nothing arrives.

        Returns:
            The reports and values of all nodes; ``None`` if the results of a node do not arrive, for example because
            one of its ranks has failed.
        """
        return self._call(self.returns.wait(lambda: self._guard.names, self._expects_nothing, patience)).result()

    def forget_returned(self) -> None:
        """Free the memory of the results that came over the channel."""
        self._call(self.returns.clear()).result()

    def attach(self, sock: socket.socket) -> None:
        """Serve a node over one end of a socket pair, and close this end later. The node inherits the other end."""
        self._call(self._serve_socket(sock)).result()

    def hear(self, node: str, message: Message) -> None:
        """Give the listener a message about a node that is not connected yet."""
        with suppress(RuntimeError):  # the run has just ended, so the event loop is closed
            self._loop.call_soon_threadsafe(self._listener.on_message, node, message)

    def await_loss(self, node: str) -> None:
        """Wait until the channel's thread has told the listener that a node is lost.

        Call this method once the node's process has ended. The method waits at most :data:`_NOTICE` seconds.
        """
        end = time.monotonic() + _NOTICE
        while node in self._peers and time.monotonic() < end:
            time.sleep(0.01)
        self._call(asyncio.sleep(0)).result()  # wait for the event loop to end a call of the listener

    def accept_if(self, accept: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Set the function that checks the facts (executor, GPUs and more) of all tasks.

        If the function returns ``False``, the driver tells the tasks to end before any rank starts, and the next call
        of :meth:`start_again` returns ``True``.
        """
        self._facts.accept = accept

    def start_again(self) -> bool:
        """Return whether the function set with :meth:`accept_if` has refused the tasks, and forget this refusal.

        The function refuses tasks if the run must not begin on the executors on which Spark has placed them. Refused
        tasks end. After this call, the driver collects the facts (address, GPUs and more) of the tasks that Spark
        starts in their place.
        """
        return self._facts.start_again()

    def stop(self, reason: str, *, grace: bool = True, hasty: bool = False) -> None:
        """Order all nodes to stop their ranks, including nodes that connect later.

        Args:
            reason: the reason, for people to read.
            grace: whether ranks get a grace period before they are killed; ``False`` also ends a grace period that has
                already begun.
            hasty: whether another attempt waits for the ranks to end. If so, nodes kill each rank as soon as it is not
                writing a file.
        """
        with suppress(RuntimeError):  # the run has just ended, so the event loop is closed
            self._loop.call_soon_threadsafe(self._order_stop, messages.Stop(reason[:_LONGEST_REASON], grace, hasty))

    def begin(self, attempt: int, port: int) -> None:
        """Order all nodes to begin another attempt, including nodes that connect again later.

        The order to begin revokes an earlier order to stop.

        Args:
            attempt: number of the attempt.
            port: the port on node 0 at which the ranks of the attempt meet.
        """
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._order_next, messages.Begin(attempt, port))

    def end(self) -> None:
        """Tell all nodes that there is no further attempt, including nodes that connect again later."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._order_next, messages.End())

    @property
    def stop_reason(self) -> str:
        """The reason why nodes were ordered to stop; ``""`` if they were not."""
        return "" if self._standing.stop is None else self._standing.stop.reason

    def order(self, order: Message) -> None:
        """Send an order to all nodes that are connected now."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send_all, order)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as an asyncio task until the coroutine ends or the server closes."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve_socket(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        await self._start(self._serve(reader, writer, window=0.0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: float) -> None:
        """Read the frames of one connection until it ends.

        After the end of its connection, a node that has not said good-bye counts as lost unless it reconnects within
        ``window`` seconds. If the network broke the connection and ``window`` is not 0, the node has the server's
        ``timeout`` instead.
        """
        node, why = None, "its agent ended without giving a reason"
        try:
            first = await asyncio.wait_for(
                frames.read(reader, self._guard.first_limit), _FIRST_TIMEOUT if window else None
            )
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
        """Serve a connection whose first message is not a node's hello, until the connection ends.

        A connection that does not begin with a hello carries, for example, the facts of a task (address, GPUs and
        more), a return value or a file.

        Raises:
            ProtocolError: the message cannot begin a connection in this run.
        """
        match message:
            case messages.TaskFacts():
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
                self._door.admit()
                await self.intake.receive(message, writer)
            case messages.Deposit() if (depository := self.returns.depository) is not None:
                node = self._guard.check_deposit(message)
                self._door.admit()
                await depository.receive(message, node, reader, writer)
            case messages.Fetch() if (depository := self.returns.depository) is not None:
                self._guard.check_node(message)
                self._door.admit()
                await depository.give(writer)
            case messages.Holding():
                self._guard.check_node(message)
                self._door.admit()
                cast("asyncio.Task[None]", asyncio.current_task()).set_name(_HOLDING)
                await reader.read(1)  # wait until the node has ended
            case messages.Withdraw() if (depository := self.returns.depository) is not None:
                node = self._guard.check_deposit(message)
                self._door.admit()
                await depository.withdraw(message, node, writer)
            case _:
                raise frames.ProtocolError(f"no connection of this run begins with a {type(message).__name__} message")

    async def _follow(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a node's messages until it says good-bye, or its connection ends or is replaced by another one."""
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
                self._send(writer, messages.Heard(self._listener.offsets(node)))
                await writer.drain()  # do not keep writing to a node that never reads
            if isinstance(message, messages.Bye):
                self._send(writer, messages.Farewell(self._listener.offsets(node), self._standing.stop is not None))
                del self._peers[node]
                return
            turn += 1
            if turn % _TURN == 0:
                await asyncio.sleep(0)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        """Call the listener. If it raises an exception, the driver has failed, and not the node."""
        try:
            call(*arguments)
        except Exception as error:  # such as an exception of a handler of the user's log, which may raise another one
            with suppress(Exception):
                told = "the driver failed to take a message of a node"
                self._loop.call_exception_handler({"message": told, "exception": error})

    async def _exchange(
        self, message: messages.TaskFacts, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Keep the facts of a task (address, GPUs and more) while the task is connected.

        Answer the task once the facts of all tasks have arrived, or once it is clear that some facts cannot arrive. If
        the run is being stopped, or an agent has connected and the task is new, order the task to stop at once.

        Raises:
            ProtocolError: the task sends more data after its facts.
            ValueError: too many connections from tasks are open.
        """
        facts = self._facts
        if facts.over and not facts.knows(message):
            self._send(writer, messages.Stop(_AGAIN))
            return
        if self._standing.stop is not None:
            self._send(writer, self._standing.stop)
        facts.take(writer, message)
        self._door.admit()
        if facts.fallback is not None and facts.settled:
            facts.fallback.cancel()
            facts.fallback = None
        elif facts.fallback is None and not facts.settled:
            facts.fallback = self._loop.call_later(_FACTS_TIMEOUT, self._give_facts_up)
        self._answer_facts()
        try:
            if await reader.read(1):  # wait until the task has its answer, or has ended
                raise frames.ProtocolError("the task sends more data after its facts (address, GPUs and more)")
        finally:
            facts.forget(writer)

    def _give_facts_up(self) -> None:
        """Tell all tasks to exchange their facts through Spark's ``allGather``. If the run has begun, stop it instead.

        This method is called if facts (address, GPUs and more) are still missing :data:`_FACTS_TIMEOUT` seconds after a
        task has sent its facts. Usually, some tasks cannot reach the driver, so all tasks must use ``allGather``. But
        if the driver received the facts of all tasks earlier, the run has begun. The missing facts then belong to tasks
        that Spark started again after it lost a task. In this case, stop the run: only the driver decides whether the
        run's ranks start again, not Spark.
        """
        if self._facts.begun:
            self._order_stop(messages.Stop(_AGAIN))
            return
        self._facts.give_up()
        self._answer_facts()

    def _answer_facts(self) -> None:
        if (answer := self._facts.answer()) is not None:
            for writer in self._facts.waiting():
                self._send(writer, answer)

    def _welcome(self, message: messages.Hello, writer: asyncio.StreamWriter) -> str:
        """Register a connection of the node that the hello (the first message) names.

        The connection takes the place of an older connection of the node.

        Raises:
            ProtocolError: the run has no such node, the node's secret is not valid, or another process has registered
                as this node.
        """
        node = message.node
        try:
            self._guard.admit(message)
        except frames.ProtocolError:
            if self._standing.stop is not None:  # perhaps Spark has started the task again: the task must not begin
                self._send(writer, self._standing.stop)
                self._send(writer, messages.Farewell((), True))
            raise
        self._door.admit()
        self.reached = True
        self._facts.over = self._facts.over or bool(message.placement)
        before = self._peers.get(node)
        self._peers[node] = _Peer(writer, self._loop.time())
        if before is not None:
            before.stay()
            before.writer.close()
        self._tell(self._listener.on_message, node, message)
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
        """Return whether no more results of nodes can arrive.

        No more results can arrive if the run is stopped, or if no node is connected and none has sent results before.
        """
        return self._standing.stop is not None or not (self._peers or self.returns)

    def _lose(self, node: str, why: str) -> None:
        if (peer := self._peers.pop(node, None)) is not None:
            peer.stay()
            peer.writer.transport.abort()
            self._guard.forget(node)
            self._listener.on_lost(node, why)

    def _order_stop(self, order: messages.Stop) -> None:
        stop = self._standing.stop
        if stop is None or (stop.grace and (not order.grace or (order.hasty and not stop.hasty))):
            self._standing.stop = order
            self._send_all(order)
            self.intake.abort()  # the agents connect again, and then get the order to stop
            for writer in self._facts.waiting():
                self._send(writer, order)

    def _order_next(self, order: messages.Begin | messages.End) -> None:
        if order == self._standing.next:
            return
        if isinstance(order, messages.Begin):
            self._standing.stop = None
        self._standing.next = order
        self._send_all(order)

    def _send_all(self, order: Message) -> None:
        for peer in self._peers.values():
            self._send(peer.writer, order)

    def _send(self, writer: asyncio.StreamWriter, message: Message) -> None:
        if writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > _MOST_UNREAD:
            self._refuse(writer, "does not read what the driver sends")
            return
        writer.write(frames.pack(message))

    def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        address = writer.get_extra_info("peername")
        self._guard.log(address[0] if address else "this machine", why)
        writer.transport.abort()

    async def _end_tasks(self, staying: str | None = None) -> None:
        """End all asyncio tasks except those that are named ``staying``, and stop listening.

        Tell nodes that are still connected that the job has ended. Otherwise, they would try to reconnect until Spark
        kills their tasks, and the next job would wait for the slots of these tasks.
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
        self._door.close()
        await asyncio.sleep(0)  # transports close in the next round of the event loop


async def _await_closing(writers: Sequence[asyncio.StreamWriter]) -> None:
    """Wait until the nodes have closed their connections, for at most :data:`_DISMISSAL` seconds.

    After :data:`_DISMISSAL` seconds, end the connections that are still open.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + _DISMISSAL
    while loop.time() < end and not all(writer.is_closing() for writer in writers):
        await asyncio.sleep(0.01)
    for writer in writers:
        writer.transport.abort()


async def _end(writer: asyncio.StreamWriter) -> None:
    """Close a connection once the other side has read all that was sent, or after :data:`_LINGER` seconds.

    Until the connection is closed, it counts as a stranger if it has sent no valid first message. The number of
    strangers is limited (see ``Door``).
    """
    writer.close()
    try:
        with suppress(OSError):  # OSError includes TimeoutError
            await asyncio.wait_for(writer.wait_closed(), _LINGER)
    finally:
        writer.transport.abort()
