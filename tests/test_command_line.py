"""The command line runs: true exit codes, output as ranks wrote it, nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import pyte
import pytest
import watch
from sessions import path_without_torch

SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
print("arguments", sys.argv[1:], flush=True)
print("careful", file=sys.stderr, flush=True)
dist.barrier()
what = sys.argv[1] if len(sys.argv) > 1 else ""
if rank == 1 and what == "raise":
    raise ValueError("learning rate must be positive")
if rank == 1 and what.isdigit():
    sys.exit(int(what))
if rank == 1 and what == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and what == "nameless":
    os.kill(os.getpid(), 40)
while what == "wait" and not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
"""

HERE = [sys.executable, "-m", "distributor", "run", "-n", "2", "--no-gpu"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(autouse=True)
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks all that a command starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def distributor(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HERE, *arguments], capture_output=True, text=True, timeout=400, cwd=cwd)


def nothing_is_left() -> None:
    def marked(process: psutil.Process) -> bool:
        try:
            return process.environ().get("TMPDIR") == os.environ["TMPDIR"] and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    own = psutil.Process()
    watch.until(lambda: not [p for p in psutil.process_iter() if p != own and marked(p)])
    assert [path.name for path in Path(os.environ["TMPDIR"]).iterdir() if path.name.startswith("distributor-")] == []


def test_output_is_the_ranks_and_0_is_success(script: str) -> None:
    done = distributor("--local", script, "--lr", "0.1", "-n", "7")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.partition("] ")[2] for line in lines] == ["arguments ['--lr', '0.1', '-n', '7']"] * 2
    assert [line.split()[:2] for line in lines] == [["[rank", "0"], ["[rank", "1"]]
    assert [line.partition("] ")[2] for line in done.stderr.splitlines() if "[rank " in line] == ["careful", "careful"]


@pytest.mark.slow
def test_a_script_from_a_here_document() -> None:
    """A shell may keep the document in a file that has no name any more."""
    with tempfile.TemporaryFile() as document:
        document.write(b"import sys\nprint('arguments', sys.argv[1:])\n")
        document.seek(0)
        command = [*HERE, "--local", "--no-prefix", "/dev/stdin", "--lr", "0.1"]
        done = subprocess.run(command, stdin=document, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["arguments ['--lr', '0.1']"] * 2
    nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "told"),
    [
        pytest.param("raise", 1, ": ValueError: learning rate must be positive", marks=pytest.mark.long),
        ("7", 7, ": exited with code 7"),
        pytest.param("die", 137, ": killed by SIGKILL", marks=pytest.mark.long),
        pytest.param("nameless", 168, ": killed by signal 40", marks=pytest.mark.long),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(script: str, what: str, code: int, told: str) -> None:
    done = distributor("--local", "--no-prefix", script, what)
    assert done.returncode == code
    assert done.stdout.splitlines() == [f"arguments ['{what}']"] * 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("distributor: ")]
    assert line.startswith("distributor: rank 1 on ")
    assert line.endswith(told)
    assert "distributor/api/" not in done.stderr  # no traceback of the driver's
    assert done.stderr.count("Traceback") == (what == "raise")
    nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_ended_ends_its_ranks(script: str, tmp_path: Path, signum: int, code: int) -> None:
    process = subprocess.Popen(
        [*HERE, "--local", "--grace-period", "1", script, "wait", str(tmp_path / "never")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # ranks run
    process.send_signal(signum)
    _, err = process.communicate(timeout=watch.DEADLINE)
    assert process.returncode == code
    assert re.search(r"^\[distributor\] run \w+: interrupted; ranks? 0.* at train\.py:\d+$", err, re.MULTILINE), err
    assert err.splitlines()[-1] == f"distributor: {'interrupted' if signum == signal.SIGINT else 'terminated'}"
    nothing_is_left()


SAVING = """
import time
from distributor import runtime
print("trains", flush=True)
for step in range(1, 10**6):
    if runtime.should_stop(step):
        runtime.save_checkpoint({"step": step}, step, wait=True)
        break
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_command_that_gets_sigterm_lets_ranks_save(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVING)
    saved = tmp_path / "saved"
    process = subprocess.Popen(
        [*HERE, "--local", "--no-prefix", "--checkpoints", str(saved), str(tmp_path / "train.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["trains\n"] * 2
    process.terminate()
    _, err = process.communicate(timeout=watch.DEADLINE)
    assert process.returncode == 143, err
    assert len([*saved.glob("step-*/manifest.json")]) == 1
    nothing_is_left()


@pytest.mark.slow
def test_a_module_of_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import sys, pkg.other\nprint(pkg.other.NAME, sys.argv[1:])\n")
    (tmp_path / "pkg" / "other.py").write_text("NAME = 'other'\n")
    done = distributor("--local", "--no-prefix", "-m", "pkg.train", "--lr", "0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["other ['--lr', '0.1']"] * 2


@pytest.mark.usefixtures("deepspeed")
def test_deepspeeds_configuration(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3}))
    (tmp_path / "train.py").write_text("import json, sys\nprint(json.load(open(sys.argv[-1]))['train_batch_size'])\n")
    done = distributor("--local", "--no-prefix", "--deepspeed", "ds.json", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6", "6"]


@pytest.mark.spark
@pytest.mark.long
def test_masters_on_this_machine_run_the_drivers_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_without_torch(tmp_path / "bare"))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    project = tmp_path / "project"
    project.mkdir()
    (project / "where.py").write_text("import os, sys\nprint(sys.executable, os.listdir())\n")
    on_spark = ["--master", "local[2]", "--conf", "spark.ui.enabled=false", "--working-dir", str(project)]
    done = distributor("--no-prefix", *on_spark, "where.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{sys.executable} ['where.py']"] * 2


@pytest.mark.spark
@pytest.mark.slow
def test_under_spark_submit(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # spark-submit starts it for the driver as well
    path = subprocess.run([*HERE[:3], "script-path"], capture_output=True, text=True, check=True).stdout.strip()
    submit = str(Path(sys.executable).with_name("spark-submit"))
    command = [submit, "--master", "local-cluster[2,1,1024]", "--conf", "spark.ui.enabled=false", path]
    ours = ["run", "-n", "2", "--no-gpu", script, "3"]
    done = subprocess.run([*command, *ours], capture_output=True, text=True, timeout=400)
    assert done.returncode == 3, done.stderr[-3000:]
    # Spark sends both streams of a Python program to its stdout.
    assert [line.partition("] ")[2] for line in done.stdout.splitlines() if "] arg" in line] == ["arguments ['3']"] * 2
    assert "2 ranks on 2 nodes" in done.stdout
    assert "distributor: rank 1 on " in done.stdout
    planned = subprocess.run([*command, "run", "--dry-run", script], capture_output=True, text=True, timeout=400)
    assert planned.returncode == 0, planned.stderr[-3000:]
    told = "Spark, master local-cluster[2,1,1024]: 1 rank, with 1 GPU each, requested from Spark"
    assert told in planned.stdout
    assert "SparkContext" not in planned.stdout + planned.stderr
    nothing_is_left()


class Terminal:
    """A command in a terminal of 100 columns, and what its user sees."""

    def __init__(self, command: Sequence[str]) -> None:
        self.screen = pyte.Screen(100, 30)
        self.said = b""
        stream = pyte.ByteStream(self.screen)
        self.pid, descriptor = pty.fork()
        self._descriptor = descriptor
        if self.pid == 0:
            environ = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color", "PYTHONUTF8": "1"}
            os.execve(command[0], list(command), environ)

        def read() -> None:
            try:
                while data := os.read(descriptor, 1 << 16):
                    stream.feed(data)
                    self.said += data
            except OSError:  # the other end is closed
                os.close(descriptor)

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.write(self._descriptor, b"\x03")

    def wait(self) -> int:
        self._reader.join(watch.DEADLINE)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.long
def test_a_terminal_shows_what_the_run_is_doing(script: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    terminal = Terminal([*HERE, "--local", "--name", "digits", script, "wait", str(go)])
    watch.until(lambda: "importing torch on 1 node" in terminal.text())
    watch.until(lambda: "running: 2 of 2 ranks up" in terminal.text() and "  ranks 0-1" in terminal.text())
    shown = terminal.text().splitlines()
    assert sum("] arguments [" in line for line in shown) == 2
    assert ", on 1 node, run digits (" in shown[-2]  # below all that ranks have written
    go.touch()
    assert terminal.wait() == 0
    shown = terminal.text().splitlines()
    assert re.match(r"\[distributor\] run digits \(\w+\) succeeded in ", shown[-1])
    assert "running" not in terminal.text()


ON_A_SESSION = """
from pyspark.sql import SparkSession
from distributor import TorchDistributor
from distributor.schedulers.spark import sessions

def train():
    import time
    for epoch in range(4):
        print("epoch", epoch, flush=True)
        time.sleep(0.5)

def wait(_):
    import time
    time.sleep(1.5)

session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
session.sparkContext.setLogLevel("OFF")
# One order must last for the run: its start may take longer than ten seconds on a busy machine.
sessions._BAR_INTERVAL = sessions._BAR_ORDER = 3600
print("before", flush=True)
TorchDistributor(2, False, False, progress=False).run(train)
print("after", flush=True)
session.sparkContext.parallelize(range(2), 2).foreach(wait)
"""


@pytest.mark.spark
@pytest.mark.long
def test_sparks_bar_stays_away_while_a_run_goes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ON_A_SESSION)
    terminal = Terminal([sys.executable, str(tmp_path / "train.py")])
    assert terminal.wait() == 0
    during, _, later = terminal.said.partition(b"before")[2].partition(b"after")
    assert during.count(b" epoch ") == 8
    assert b"[Stage " not in during
    assert b"[Stage " in later  # of the user's own job: the test can fail


@pytest.mark.long
def test_a_second_interrupt_cuts_the_grace_short(tmp_path: Path) -> None:
    deaf = tmp_path / "deaf.py"
    deaf.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
        "while True:\n    time.sleep(1)\n"
    )
    terminal = Terminal([*HERE, "--local", "--grace-period", "600", str(deaf)])
    watch.until(lambda: terminal.text().count("] deaf") == 2)
    terminal.interrupt()
    watch.until(
        lambda: "stopping: interrupted (interrupt again to end all ranks at once); ranks have " in terminal.text()
    )
    terminal.interrupt()
    assert terminal.wait() == 130
    *_, note, _, last = terminal.text().splitlines()  # click ends the line that a terminal has echoed ^C in
    assert re.fullmatch(r"\[distributor\] run \w+ cancelled after .*", note)
    assert last == "distributor: interrupted"
    nothing_is_left()


SAVER = """
import os, pathlib, signal, sys, time

folder = pathlib.Path(sys.argv[1])

def save(*_):
    print("saving", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.05)
    (folder / ("saved-" + os.environ["RANK"])).touch()
    sys.exit()

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""

ON_EXECUTORS = ["--master", "local-cluster[1,2,1024]", "--conf", "spark.ui.enabled=false", "--grace-period", "600"]


@pytest.mark.spark
@pytest.mark.long
def test_sigterm_to_the_whole_group_leaves_ranks_on_executors_their_grace(tmp_path: Path) -> None:
    """As ``timeout`` and batch systems send it; Spark's JVM would end of it."""
    (tmp_path / "saver.py").write_text(SAVER)
    process = subprocess.Popen(
        [*HERE, *ON_EXECUTORS, str(tmp_path / "saver.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert all("] ready" in process.stdout.readline() for _ in range(2))
    os.killpg(process.pid, signal.SIGTERM)
    assert all("] saving" in process.stdout.readline() for _ in range(2))
    assert process.poll() is None
    (tmp_path / "go").touch()
    _, err = process.communicate(timeout=watch.DEADLINE)
    assert process.returncode == 143
    assert err.splitlines()[-1] == "distributor: terminated"
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    nothing_is_left()


@pytest.mark.spark
@pytest.mark.long
def test_an_interrupt_leaves_ranks_on_executors_their_grace(tmp_path: Path) -> None:
    """Spark's own handler of Ctrl-C would cancel the job, and the ranks with it."""
    (tmp_path / "saver.py").write_text(SAVER)
    terminal = Terminal([*HERE, *ON_EXECUTORS, str(tmp_path / "saver.py"), str(tmp_path)])
    watch.until(lambda: terminal.text().count("] ready") == 2)
    terminal.interrupt()
    watch.until(lambda: terminal.text().count("] saving") == 2)
    watch.until(lambda: "stopping: interrupted (interrupt again to end all ranks at once)" in terminal.text())
    (tmp_path / "go").touch()
    assert terminal.wait() == 130
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    nothing_is_left()


@pytest.mark.spark
@pytest.mark.slow
def test_an_interrupt_while_spark_starts(script: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and is no master
        master = f"spark://127.0.0.1:{silent.getsockname()[1]}"
        terminal = Terminal([*HERE, "--master", master, script])
        watch.until(lambda: f"[distributor] starting a Spark session with master {master}" in terminal.text())
        watch.until(lambda: b"Setting default log level" in terminal.said)  # and waits for the master
        terminal.interrupt()
        assert terminal.wait() == 130
    assert any(line.endswith("distributor: interrupted") for line in terminal.text().splitlines())  # after a ^C
    nothing_is_left()


@pytest.mark.long
def test_where_the_output_is_kept_is_told(script: str) -> None:
    done = distributor("--local", "--log-dir", os.environ["TMPDIR"] + "/logs", script)
    assert done.returncode == 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("[distributor] ")]
    assert any(re.fullmatch(r"\[distributor\] run (\w+): all output goes to .*/logs/\1", line) for line in ours)


@pytest.mark.long
def test_no_progress(script: str) -> None:
    terminal = Terminal([*HERE, "--local", "--no-progress", "--no-prefix", script])
    assert terminal.wait() == 0
    assert sorted(terminal.text().splitlines()) == ["arguments []", "arguments []", "careful", "careful"]
