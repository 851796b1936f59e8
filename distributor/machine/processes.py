"""Finds, watches and ends processes on Linux.

The launcher and the ranks of a node carry ``DISTRIBUTOR_NODE_ID`` in the environment that they were started with. Their
children inherit it, even children that move to another session or process group.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from distributor.values.environment import NODE_ID, is_of_earlier_job

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_SYS_PIDFD_OPEN = 434  # the number is the same on every architecture; Linux 5.3 and later


def die_with_parent(parent: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends (prctl(2)). If it already has, exit at once."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the new parent of descendants that lose their parent (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pidfd_open(pid: int) -> int:
    """Return a descriptor that becomes readable when a process ends (pidfd_open(2))."""
    if hasattr(os, "pidfd_open"):  # a Python that was built with old headers, like conda's, lacks it
        return os.pidfd_open(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.syscall(_SYS_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def kill_by(descriptor: int, pid: int) -> None:
    """Send SIGKILL to the process of a descriptor from :func:`pidfd_open`, unless the process has ended."""
    with suppress(ProcessLookupError):
        if hasattr(signal, "pidfd_send_signal"):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        elif not readable([descriptor], 0):  # this Python lacks the function, as conda's does
            os.kill(pid, signal.SIGKILL)


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9, ``signal 40`` for a real-time signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_number(name: str) -> int:
    """Return the number of a signal with a name from :func:`signal_name`.

    >>> signal_number("SIGKILL"), signal_number("signal 40")
    (9, 40)
    """
    return int(signal.Signals.__members__.get(name) or name.removeprefix("signal "))


def processes_of(node_id: str) -> list[int]:
    """Return the pids of a node's live processes on this machine that this user may see, except this process."""
    return _marked(lambda mark: mark == node_id)


def _marked(is_wanted: Callable[[str], bool]) -> list[int]:
    """Return the pids of live processes whose environment has a node ID that ``is_wanted`` accepts."""
    begin = f"{NODE_ID}=".encode()
    pids = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as environ:
                marks = [variable for variable in environ.read().split(b"\0") if variable.startswith(begin)]
            if not any(is_wanted(os.fsdecode(mark[len(begin) :])) for mark in marks):
                continue
        except OSError:  # the process has ended, or belongs to another user
            continue
        if start_time(int(entry)) is not None:
            pids.append(int(entry))
    return pids


def children(parent: int) -> list[int]:
    """Return the pids of the children of a process, possibly including zombies."""
    try:
        pids = []
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children") as file:
                pids += [int(pid) for pid in file.read().split()]
        return pids
    except OSError:  # it has ended, or the kernel has no such file
        return _children().get(parent, [])


def descendants(ancestor: int) -> list[int]:
    """Return the pids of the live children of a process, of their children, and so on."""
    return _below(ancestor, _children())


def _children() -> dict[int, list[int]]:
    """Return the pids of the live children of every process that this user may see."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (fields := stat(int(entry))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    return children


def _below(ancestor: int, children: Mapping[int, list[int]]) -> list[int]:
    pids, ahead = [], [ancestor]
    while ahead:
        below = children.get(ahead.pop(), [])
        pids += below
        ahead += below
    return pids


_TRACKER_PATIENCE = 2.0  # seconds for Python's resource trackers to remove what killed processes have left


def kill_earlier(run_id: str, attempt: int, deadline: float = 10.0) -> None:
    """Kill the processes of a run's jobs before ``attempt``: ranks in their grace period may still hold devices."""
    _kill(lambda: set(_marked(lambda mark: is_of_earlier_job(mark, run_id, attempt))), deadline)


def kill_node(
    node_id: str, ancestor: int | None = None, deadline: float = 10.0, keep: Collection[int] = ()
) -> list[int]:
    """Kill all processes of a node until none is left or the deadline has passed. Return the pids that are left.

    Descendants of ``ancestor`` are killed too, because a child with its own environment may lack the node's ID. A
    process in uninterruptible sleep may be left.
    """

    def find() -> set[int]:
        return {*processes_of(node_id), *(descendants(ancestor) if ancestor is not None else ())} - set(keep)

    return _kill(find, deadline)


def _kill(find: Callable[[], set[int]], deadline: float) -> list[int]:
    """Kill what ``find`` returns until nothing is left or ``deadline`` seconds have passed. Return the pids left."""
    start = time.monotonic()
    while True:
        left = sorted(find())
        if not left or time.monotonic() - start > deadline:
            return left
        patient = time.monotonic() - start < _TRACKER_PATIENCE
        doomed = [pid for pid in left if not (patient and _is_tracker(pid))]
        for pid in doomed:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        wait_gone(doomed or left, min(1.0, deadline))


def _is_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker: it removes shared memory, and ends after its users."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as shown:
        return b"multiprocessing.resource_tracker" in shown.read()
    return False


def reseed() -> None:
    """Give NumPy and torch new seeds after a fork, as Python does to its own generator.

    Otherwise all forks would draw the same numbers.
    """
    numpy_random = sys.modules.get("numpy.random")  # NumPy 2 loads this module on first use
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def reap(keep: Collection[int] = ()) -> None:
    """Reap children of this process that have ended, except those in ``keep``, which another thread reaps."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in keep:  # the kernel shows no other child until this one is reaped
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def readable(descriptors: Iterable[int], timeout: float) -> list[int]:
    """Wait until some of the descriptors are readable, or for ``timeout`` seconds; return the readable ones."""
    poll = select.poll()  # select() cannot handle descriptors above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout * 1000)]


def wait_gone(pids: Collection[int], deadline: float) -> None:
    """Wait until processes have ended (zombies count as ended), for at most ``deadline`` seconds."""
    end = time.monotonic() + deadline
    for pid in pids:
        try:
            handle = pidfd_open(pid)
        except OSError:
            continue
        try:
            readable([handle], max(0.0, end - time.monotonic()))
        finally:
            os.close(handle)


def start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot (proc(5)); ``None`` if it has ended or is a zombie."""
    fields = stat(pid)
    return None if fields is None else fields[19]


def has_ended(pid: int, started: str) -> bool:
    """Return whether the process has ended that this pid and start time identify."""
    now = start_time(pid)
    if now is not None:
        return now != started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process, which may not be read
        return False
    return True  # a zombie: it has ended, but its parent has not reaped it


def stat(pid: int) -> list[str] | None:
    """Return /proc/PID/stat's fields, beginning with the state; ``None`` if the process has ended or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as stat:  # a process's name may be any bytes
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields


def state(pid: int) -> str | None:
    """Return a process's state as in proc(5): ``R``, ``S``, ``D``, ``T``, ...; ``None`` if the process has ended."""
    fields = stat(pid)
    return None if fields is None else fields[0]


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU time in seconds of each process and its descendants, also of reaped ones, by pid."""
    children = _children()
    used = {}
    for pid in pids:
        stats = [fields for process in (pid, *_below(pid, children)) if (fields := stat(process)) is not None]
        ticks = sum(int(value) for fields in stats for value in fields[11:15])  # utime, stime, cutime, cstime
        used[pid] = ticks / os.sysconf("SC_CLK_TCK")
    return used


def pid_scope() -> str:
    """Return an identifier of the scope in which a pid and a start time identify a process; ``""`` if unknown."""
    return _namespace("pid")


def machine() -> str:
    """Return an identifier of the machine or container in which a device number means one device; ``""`` if unknown.

    A container has its own mounts or control groups, and the devices that these let through are numbered from 0.
    """
    with suppress(OSError), open("/proc/self/cgroup") as groups:
        return " ".join([scope, *groups.read().split()]) if (scope := mounts()) else ""
    return ""


def mounts() -> str:
    """Return an identifier of the mount namespace; ``""`` if unknown.

    Processes in one see the same files and the same shared memory. A container that has only its own control group, as
    on YARN, is in the host's.
    """
    return _namespace("mnt")


def _namespace(kind: str) -> str:
    """Return an identifier of this process's namespace of a kind, and of the machine's boot; ``""`` if unknown."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.readlink(f'/proc/self/ns/{kind}')}"
    return ""


#: Lines of /proc/PID/status that show what a process inherits from the process that started it (proc(5)).
_INHERITED = re.compile(
    "Umask|Uid|Gid|Groups|SigBlk|SigIgn|CapInh|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed"
)


def inherited() -> dict[str, str]:
    """Return what a process started by this thread inherits, except environment, current directory and descriptors."""
    values = {}
    with open("/proc/thread-self/status", errors="replace") as status:
        for line in status:
            name, _, value = line.partition(":")
            if _INHERITED.fullmatch(name):
                values[name] = value.strip()
    for name in ("limits", "cgroup", "oom_score_adj"):
        with suppress(OSError), open(f"/proc/self/{name}") as file:
            values[name] = file.read()
    for name in sorted(os.listdir("/proc/self/ns")):
        with suppress(OSError):
            values[f"ns/{name}"] = os.readlink(f"/proc/self/ns/{name}")
    fields = stat(os.getpid())
    values["nice"] = fields[16] if fields is not None else ""
    return values


def oom_kills(vmstat: str = "/proc/vmstat") -> int:
    """Return how many processes the kernel has killed since boot for lack of memory, also within control groups."""
    try:
        with open(vmstat) as lines:
            for line in lines:
                name, _, value = line.partition(" ")
                if name == "oom_kill":  # Linux 4.13 and later
                    return int(value)
    except (OSError, ValueError):
        return 0
    return 0


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
