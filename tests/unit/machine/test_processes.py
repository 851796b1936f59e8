"""Processes, with real ones."""

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import watch

from distributor.machine import processes
from distributor.values import environment
from distributor.values.environment import NODE_ID

MARK = f"test-{os.getpid()}"


class Family:
    """Starts processes that carry a mark, and leaves none behind."""

    def __init__(self):
        self._started, self._adopted = [], []

    def __call__(self, command, mark=None, env=(), **kwargs):
        env = {**os.environ, **dict(env)}
        env.pop(NODE_ID, None)
        if mark is not None:
            env[NODE_ID] = mark
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, **kwargs)
        self._started.append(process)
        if mark is not None:  # Popen may return in the middle of execve(2), when the process has no environment yet
            watch.until(lambda: mark in Path(f"/proc/{process.pid}/environ").read_text())
        return process

    def adopt(self, pid):
        """A descriptor of a process that one of ours has started."""
        self._adopted.append(os.pidfd_open(pid))
        return self._adopted[-1]

    def end(self):
        for handle in self._adopted:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        for process in self._started:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


@pytest.fixture
def spawn():
    family = Family()
    yield family
    family.end()


SLEEP = ["sleep", "1000"]


def test_a_node_is_killed_with_what_left_its_session_and_nothing_else(spawn):
    mark = environment.node_id(MARK, 1)
    parent = spawn(["sh", "-c", "setsid sh -c 'echo $$; exec sleep 1000' & wait"], mark)
    child = int(parent.stdout.readline())
    spawn.adopt(child)
    bystanders = [
        spawn(SLEEP, environment.node_id(MARK, 10)),  # its mark begins with ours
        spawn(SLEEP, environment.node_id(MARK, 0)),
        spawn(SLEEP),
        spawn(SLEEP, env={"OTHER": f"{NODE_ID}={mark}"}),
        spawn([f"{NODE_ID}={mark}", "1000"], executable="sleep"),
    ]
    assert sorted(processes.processes_of(mark)) == sorted([parent.pid, child])

    assert processes.kill_node(mark) == []

    assert processes.processes_of(mark) == []
    assert parent.wait() == -signal.SIGKILL
    for bystander in bystanders:
        bystander.terminate()
        assert bystander.wait() == -signal.SIGTERM  # had it been killed before, that would be the signal


def test_a_process_can_be_kept(spawn):
    kept, other = spawn(SLEEP, MARK), spawn(SLEEP, MARK)
    assert processes.kill_node(MARK, keep=[kept.pid]) == []
    assert other.wait() == -signal.SIGKILL
    assert processes.processes_of(MARK) == [kept.pid]


def test_killing_a_node_that_is_gone(spawn):
    assert processes.kill_node(f"{MARK}.none") == []


def test_killing_a_node_spares_the_calling_process(spawn):
    code = f"from distributor.machine import processes as p; print(p.processes_of('{MARK}'), p.kill_node('{MARK}'))"
    caller = spawn([sys.executable, "-c", code], MARK)
    assert caller.communicate()[0] == "[] []\n"
    assert caller.returncode == 0


def test_zombies_are_not_found(spawn):
    process = spawn(SLEEP, MARK)
    assert processes.processes_of(MARK) == [process.pid]
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    assert processes.processes_of(MARK) == []


def ended(process):
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_wait_gone_waits_for_all(spawn):
    # Each takes a while to end, so that a wait that does not wait is seen.
    waited = [spawn(["sh", "-c", "read _; sleep 0.1"], stdin=subprocess.PIPE) for _ in range(3)]
    for process in waited:
        process.stdin.close()
    processes.wait_gone([process.pid for process in waited], 60)
    assert all(map(ended, waited))


def test_wait_gone_gives_up_at_its_deadline(spawn):
    process = spawn(SLEEP)
    processes.wait_gone([process.pid], 0.01)
    assert not ended(process)


def test_wait_gone_returns_at_once_for_who_is_gone(spawn):
    zombie, reaped = spawn(["true"]), spawn(["true"])
    reaped.wait()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    waiting = threading.Thread(target=processes.wait_gone, args=([zombie.pid, reaped.pid], 1000), daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()


def test_start_time_tells_processes_apart(spawn, tmp_path):
    # The kernel shows the name of the program in the same line: spaces and brackets in it must not shift the fields. It
    # may be any bytes.
    program = tmp_path / os.fsdecode(b"a) R 1 (b\xff")
    shutil.copy(shutil.which("sleep"), program)
    plain, odd = spawn(SLEEP), spawn([str(program), "1000"])
    own = processes.start_time(os.getpid())
    for process in (plain, odd):
        started = processes.start_time(process.pid)
        assert started == processes.start_time(process.pid)
        assert int(started) >= int(own)
        process.kill()
        process.wait()
        assert processes.start_time(process.pid) is None
    assert own == processes.start_time(os.getpid())


def test_start_time_is_the_kernels_own(spawn):
    process = spawn(SLEEP)
    with open(f"/proc/{process.pid}/stat") as stat:
        # "sleep" has no space: here fields can be counted from the left (proc(5), field 22).
        assert processes.start_time(process.pid) == stat.read().split()[21]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nr_free_pages 1\noom_kill 17\nother 3\n", 17),
        ("oom_kill 0\n", 0),
        ("oom_killer 4\nnot_oom_kill 5\n", 0),
        ("oom_kill many\n", 0),
        ("", 0),
    ],
)
def test_oom_kills(tmp_path, text, expected):
    path = tmp_path / "vmstat"
    path.write_text(text)
    assert processes.oom_kills(str(path)) == expected


def test_oom_kills_where_the_kernel_does_not_tell(tmp_path):
    assert processes.oom_kills(str(tmp_path / "absent")) == 0


TIED = """
import os, signal
from distributor.machine import processes
parent = os.getpid()
if os.fork() == 0:
    os.setsid()  # a signal to the parent's group is not what ends it
    processes.die_with_parent(parent)
    print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(spawn, number):
    parent = spawn([sys.executable, "-c", TIED])
    child = spawn.adopt(int(parent.stdout.readline()))
    assert not select.select([child], [], [], 0)[0]
    parent.send_signal(number)
    assert select.select([child], [], [], 60)[0]


def test_a_child_whose_parent_is_gone_already_ends_at_once(spawn):
    code = "from distributor.machine import processes; processes.die_with_parent(0); print('alive')"
    child = spawn([sys.executable, "-c", code])
    assert child.communicate()[0] == ""
    assert child.returncode == 1


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (9, "SIGKILL"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGRTMIN + 3, f"signal {signal.SIGRTMIN + 3}"),
        (0, "signal 0"),
    ],
)
def test_signal_name(number, name):
    assert processes.signal_name(number) == name


def test_cpu_count_is_what_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 5, 7})
    assert processes.cpu_count() == 3


def test_the_machine_of_devices():
    assert processes.machine() == processes.machine() != ""


def test_children_are_those_of_one_process_only(spawn):
    parent = spawn(["sh", "-c", "sh -c 'sleep 1000 & echo $!; echo $$; wait' & wait"])
    grandchild, child = int(parent.stdout.readline()), int(parent.stdout.readline())
    spawn.adopt(grandchild)
    spawn.adopt(child)
    assert processes.children(parent.pid) == [child]
    assert processes.children(child) == [grandchild]
    assert processes.children(grandchild) == []


REAPS = """
import os, subprocess, sys
from distributor.machine import processes
first, kept, last = (subprocess.Popen(["true"]) for _ in range(3))
for each in (first, kept, last):
    os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)
processes.reap([kept.pid])
left = processes.children(os.getpid())
assert kept.pid in left and first.pid not in left, left
processes.reap()
assert processes.children(os.getpid()) == []
processes.reap()
"""


def test_ended_children_are_reaped_up_to_one_that_is_kept(spawn):
    assert spawn([sys.executable, "-c", REAPS]).wait() == 0
