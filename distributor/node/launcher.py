"""The launcher: starts a node's ranks, as forks or new processes, under torch's elastic agent.

It imports torch once. Forking ranks from it is safe: it runs no user code, never touches CUDA, and starts no Python
thread and no parallel region before. Its main thread watches the ranks, another one waits for the other nodes. The
node's agent does all other communication.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch  # noqa: F401  # first, so that a Python without torch is said to lack torch

from distributor.machine import bootstrap, forks
from distributor.machine.bootstrap import overwrite
from distributor.machine.processes import die_with_parent, readable
from distributor.node import launchers
from distributor.node.rank_supervisor import RankSupervisor
from distributor.node.rendezvous import Rendezvous
from distributor.rank import lookups, slow_import
from distributor.values import layout, messages
from distributor.values.environment import NODE_ID
from distributor.values.layout import ALL_STACKS_SIGNAL, MAIN_STACK_SIGNAL
from distributor.values.plan import NodeOrder

#: What a spare shows in its command line in place of ``launcher``, padded to the same length.
_SPARE = "spare".ljust(len("launcher"), "\0")

_LOOK = 0.5  # seconds between looks at what ranks have imported

_telling = threading.Lock()


def main(path: str, agent_pid: str) -> None:
    """Run this node's ranks to their end (entry point of a new process)."""
    die_with_parent(int(agent_pid))
    order = launchers.read(path)
    for inherited in (order.event_fd, order.store_fd, order.spare_fd, order.slots_fd):
        if inherited is not None:
            os.set_inheritable(inherited, False)  # ranks that are new processes must not inherit it
    _begin(order, int(agent_pid))


def become(order: NodeOrder, agent_pid: int, owner: int) -> None:
    """Make this fork of the agent look like a new process, then run the ranks (entry point of the fork)."""
    overwrite(bootstrap.title("agent", owner), bootstrap.title("launcher", agent_pid))
    overwrite(bootstrap.UNMARKED, f"{NODE_ID}={order.environ[NODE_ID]}", "environ")
    _settle(order)
    _begin(order, agent_pid)


def _settle(order: NodeOrder) -> None:
    """Take the order's environment, and send output to the launcher's log."""
    log = os.open(layout.launcher_log(order.folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.environ.clear()
    os.environ.update(order.environ)


def _begin(order: NodeOrder, agent_pid: int) -> NoReturn:
    if (spare_fd := order.spare_fd) is not None:
        order = replace(order, imported=mmap.mmap(-1, order.plan.node.local_world_size))
        _fork_spare(order, spare_fd, agent_pid)
    _launch(order)


def _fork_spare(order: NodeOrder, spare_fd: int, agent_pid: int) -> None:
    """Fork the spare, which waits for the agent's order.

    It ends if its connection to the agent closes meanwhile. ``PR_SET_PDEATHSIG`` would not work here, because its
    parent is this launcher, not the agent.
    """
    if os.fork() != 0:
        os.close(spare_fd)
        return
    try:
        for descriptor in (order.event_fd, order.store_fd, order.slots_fd):
            if descriptor is not None:
                os.close(descriptor)
        overwrite("launcher", _SPARE)
        line = socket.socket(fileno=spare_fd)
        line.send(str(os.getpid()).encode())
        _import_early(order, line)
        following = launchers.await_order(line)
        if following is None:
            os._exit(0)
        die_with_parent(agent_pid)  # the agent has adopted this process by now
        overwrite(_SPARE, "launcher")
        _settle(following)
        _begin(following, agent_pid)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _import_early(order: NodeOrder, line: socket.socket) -> None:
    """Import what all ranks have imported, unless the next order comes before."""
    while not slow_import.is_loaded() and not readable([line.fileno()], _LOOK):
        if order.imported is not None and slow_import.by_all(order.imported):
            slow_import.repeat({**order.environ, **order.plan.rank_env[0]}, order.cwd, order.sys_path)
            if (broken := forks.what_breaks()) is not None:
                raise RuntimeError(f"cannot fork the next attempt's ranks: an import {broken}")


def _launch(order: NodeOrder) -> NoReturn:
    """Run the ranks to their end, report to the agent, and exit with code 0 whatever the outcome."""
    tell = partial(_tell, order)
    try:
        watch = RankSupervisor(order, tell)
        watch.handle_signals()
        for stacks_signal in (ALL_STACKS_SIGNAL, MAIN_STACK_SIGNAL):
            signal.signal(stacks_signal, signal.SIG_IGN)  # by default it would kill a rank that has no handler yet
        tell(messages.LauncherReady(time.time()))
        lookups.switch_off(order.folder)
        watch.raise_limits()
        watch.fork_ranks()
        Rendezvous(order, watch, tell).start()
        watch.run()
    except BaseException as error:
        tell(messages.LauncherFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        sys.stderr.flush()
        # Exit at once: the store's server thread must not outlive the run, and a destructor must not wait for it.
        os._exit(0)


def _tell(order: NodeOrder, message: messages.Message) -> None:
    """Send the agent a message as a line of JSON."""
    line = json.dumps(messages.encode(message)).encode() + b"\n"
    with suppress(BrokenPipeError), _telling:
        while line:
            line = line[os.write(order.event_fd, line) :]
