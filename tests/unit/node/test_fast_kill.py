"""Which ranks are still writing, and how those that are not are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import watch

from distributor.machine.open_files import FileState, regular
from distributor.node.fast_kill import is_writing, kill_idle

_OLD = FileState(10, 0)


def test_what_counts_as_writing() -> None:
    new = FileState(10, 10**12)
    assert not is_writing(None, {}, 1000.0)
    assert not is_writing(None, {"log": _OLD}, 1000.0)
    assert is_writing(None, {"log": _OLD, "file": new}, 1000.5)
    assert is_writing({"log": _OLD}, {"log": FileState(11, 0)}, 1000.0)
    assert is_writing({}, {"file": _OLD}, 1000.0)  # it has just been opened
    assert not is_writing({"file": new}, {"file": new}, 1002.0)


def test_which_files_count(tmp_path: Path) -> None:
    own, other = tmp_path / "node", tmp_path / "data"
    own.mkdir()
    other.mkdir()
    (other / "read").write_text("x")
    with open(own / "log", "w"), open(other / "file", "w"), open(other / "read"), open("/dev/null", "w"):
        found = [path for path in regular(os.getpid(), str(own)) if path.startswith(str(tmp_path))]
    assert found == [str(other / "file")]
    assert regular(2**22 + 1, str(own)) == {}


def test_the_one_that_writes_lives_longer(tmp_path: Path) -> None:
    """One process has an old log open, the other writes for a second."""
    log, file = tmp_path / "log", tmp_path / "file"
    log.touch()
    os.utime(log, (1.0, 1.0))
    idle = f"import time; log = open({str(log)!r}, 'a'); print('up', flush=True); time.sleep(600)"
    busy = f"""
import time
with open({str(file)!r}, 'w') as file:
    print('up', flush=True)
    for _ in range(20):
        file.write('x')
        file.flush()
        time.sleep(0.05)
print('done', flush=True)
time.sleep(600)
"""
    made = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for code in (idle, busy)]
    for process in made:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    killed: set[int] = set()

    def alive() -> dict[int, int]:
        return {number: process.pid for number, process in enumerate(made) if process.poll() is None}

    asyncio.run(asyncio.wait_for(kill_idle(alive, str(tmp_path / "node"), killed), watch.DEADLINE))
    assert killed == {0, 1}
    assert [process.wait() for process in made] == [-signal.SIGKILL] * 2
    assert file.read_text() == "x" * 20
    assert made[1].stdout is not None
    assert made[1].stdout.read() == "done\n"
