"""What ranks are doing: from real dumps of real waits, and from texts of other Pythons."""

import contextlib
import linecache
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given, strategies as st

from distributor.node import launcher, rank_supervisor
from distributor.outcomes import stacks
from distributor.outcomes.stacks import Frame, Stacks, Thread
from distributor.rank import process as rank, result
from distributor.shipping import pickling
from distributor.text import cells

#: Registers, then runs a script: the outermost frames are not the user's, like those of a launcher.
START = """
import faulthandler, runpy, signal, sys
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "ab"), all_threads=True)
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def dump_of(script, expected):
    """Runs a script and asks for its stacks until it is where it should be; returns the last dump.

    The script prints an empty line when its threads run: faulthandler may crash a Python whose other threads change.
    """
    path = script.with_suffix(".dump")
    command = [sys.executable, "-c", START, str(path), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=script.parent, start_new_session=True) as process:
        end = time.monotonic() + 60

        def is_there():
            return process.poll() is None and time.monotonic() < end

        try:
            assert b"\n" in iter(process.stdout.readline, b"")  # gloo of torch 2.9 prints lines of its own
            text = ""
            while stacks.where(text) != expected and is_there():
                before = path.stat().st_size
                process.send_signal(signal.SIGUSR1)
                text = ""
                while not text.endswith(("in <module>\n", "...\n")) and is_there():
                    time.sleep(0.01)
                    text = path.read_bytes()[before:].decode()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == -signal.SIGSEGV:
        return dump_of(script, expected)
    assert stacks.where(text) == expected, text
    return text


def write(folder, name, source):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source).lstrip("\n"))
    return path


def line_of(script):
    """The number of the line that is marked as the one where it hangs."""
    return next(number for number, line in enumerate(script.open(), 1) if line.endswith("# here\n"))


WAITS = {
    "a lock": ("train", "import threading", "lock = threading.Lock()", "lock.acquire()", "lock.acquire()  # here"),
    "a block with a lock": (
        "train",
        "import threading",
        "lock = threading.Lock()",
        "lock.acquire()",
        "with lock:  # here",
        "    pass",
    ),
    "a queue": ("get", "import queue", "queue.Queue().get()  # here"),
    "an event": ("wait", "import threading", "threading.Event().wait()  # here"),
    "a process": ("run", "import subprocess", "subprocess.run(['sleep', '100'])  # here"),
    "an event loop": ("run", "import asyncio", "asyncio.run(asyncio.sleep(100))  # here"),
    "sleep": ("train", "import time", "time.sleep(100)  # here"),
    "a pipe": ("train", "import os", "os.read(os.pipe()[0], 1)  # here"),
    "no wait at all": ("train", "while True: pass  # here"),
    "code without a file": ("<module>", "exec('while True: pass')  # here"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait(wait, tmp_path):
    called, *lines = WAITS[wait]
    script = write(tmp_path, "train.py", "\n    ".join(["def train():", "print(flush=True)", *lines]) + "\ntrain()\n")
    text = dump_of(script, f"{called} at train.py:{line_of(script)}")
    main = stacks.main_thread(stacks.parse(text))
    assert main.current
    assert main.frames[-1] == Frame("<string>", 4, "<module>")
    assert stacks.trim(text) == text


def test_the_top_of_a_script(tmp_path):
    dump_of(write(tmp_path, "train.py", "import time\nprint(flush=True)\ntime.sleep(100)\n"), "<module> at train.py:3")


def test_threads_of_the_user_do_not_count(tmp_path):
    source = """
        import threading, time
        def load():
            time.sleep(100)
        threads = [threading.Thread(target=load, name="Thread [a] (most recent call first):") for _ in range(3)]
        for thread in threads:
            thread.start()
        print(flush=True)
        threads[0].join()  # here
    """
    script = write(tmp_path, "train.py", source)
    text = dump_of(script, f"join at train.py:{line_of(script)}")
    assert [thread.current for thread in stacks.parse(text)] == [False, False, False, True]
    assert all(Frame(str(script), 3, "load") in thread.frames for thread in stacks.parse(text)[:3])


def test_more_threads_than_python_lists(tmp_path):
    source = """
        import threading
        event = threading.Event()
        for _ in range(120):
            threading.Thread(target=event.wait, daemon=True).start()
        print(flush=True)
        event.wait()
    """
    text = dump_of(write(tmp_path, "train.py", source), "too many threads to list the main thread")
    assert len(stacks.parse(text)) == 100
    assert stacks.summary({0: text}) == "rank 0: too many threads to list the main thread"


# What is around a rank: functions of these names and files, and a thread that must stay whole.
LAUNCHER = {
    "start.py": "from distributor.node import launcher\nlauncher.main()\n",
    "distributor/__init__.py": "",
    "distributor/node/launcher.py": """
        import threading
        from distributor.rank import process
        def main():
            threading.Thread(target=process.idle, daemon=True).start()
            print(flush=True)
            process.main()
    """,
    "distributor/rank/process.py": """
        import os, runpy, threading
        from distributor.shipping import pickling
        def idle():
            threading.Event().wait()
        def main():
            call()
        def call():
            if os.path.exists(os.path.dirname(__file__) + "/../../train.py"):
                runpy.run_path(os.path.dirname(__file__) + "/../../train.py", run_name="__main__")
            pickling.load_function()
    """,
    "distributor/shipping/pickling.py": """
        import threading
        def load_function():
            try:
                import user
            except ImportError:
                threading.Event().wait()
    """,
    # The user's own project may have the same name.
    "project/distributor/train.py": "def train():\n    import time\n    time.sleep(100)\n",
}


def launch(folder, files):
    for name, source in {**LAUNCHER, **files}.items():
        write(folder, name, source)
    return folder / "start.py"


def test_the_launcher_is_trimmed_from_a_script(tmp_path):
    source = """
        import os, sys
        sys.path.insert(0, os.path.dirname(__file__) + "/project/distributor")
        import train
        train.train()
    """
    text = dump_of(launch(tmp_path, {"train.py": source}), "train at train.py:3")
    trimmed = stacks.trim(text)
    idle, main = stacks.parse(trimmed)
    folder = f"{tmp_path}/distributor/rank/../.."
    assert main.frames == (
        Frame(f"{folder}/project/distributor/train.py", 3, "train"),
        Frame(f"{folder}/train.py", 4, "<module>"),
    )
    assert idle == stacks.parse(text)[0]
    assert any(frame.file.endswith("distributor/rank/process.py") for frame in idle.frames)
    assert text.startswith(trimmed)
    assert stacks.where(trimmed) == "train at train.py:3"


def test_the_launcher_is_trimmed_from_a_function(tmp_path):
    text = dump_of(launch(tmp_path, {"user.py": "import time\ntime.sleep(100)\n"}), "<module> at user.py:2")
    trimmed = stacks.trim(text)
    frames = stacks.main_thread(stacks.parse(trimmed)).frames
    assert frames[0] == Frame(f"{tmp_path}/user.py", 2, "<module>")
    assert all(frame.file.startswith("<frozen importlib") for frame in frames[1:])


def test_a_rank_that_is_not_in_code_of_the_user(tmp_path):
    files = {"distributor/rank/process.py": "import time\ndef idle(): pass\ndef main():\n    time.sleep(100)\n"}
    text = dump_of(launch(tmp_path, files), "main at process.py:4")
    assert stacks.trim(text) == text


def test_a_rank_that_waits_outside_of_code_of_the_user(tmp_path):
    files = {
        "distributor/rank/process.py": """
            import os, sys
            sys.path.insert(0, os.path.dirname(__file__) + "/../../site-packages")
            import library
            def idle(): pass
            def main():
                library.join()
        """,
        "site-packages/library.py": "import time\ndef join():\n    time.sleep(100)\n",
    }
    text = dump_of(launch(tmp_path, files), "join at library.py:3")
    [frame] = stacks.main_thread(stacks.parse(stacks.trim(text))).frames
    assert frame.function == "join"


def test_the_files_of_this_package():
    for module in (launcher, pickling, rank, rank_supervisor, result):
        assert stacks._LIBRARY.search(module.__file__)
    assert stacks._RANK.search(rank.__file__)
    assert stacks._STARTER.search(pickling.__file__)


def test_a_worker_of_a_data_loader_that_hangs(tmp_path):
    source = """
        import time, torch
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                print(flush=True)
                time.sleep(100)
        def train():
            for batch in torch.utils.data.DataLoader(Data(), num_workers=1):  # here
                print(batch)
        train()
    """
    script = write(tmp_path, "train.py", source)
    dump_of(script, f"DataLoader at train.py:{line_of(script)}")


def test_a_collective_without_its_peer(tmp_path):
    source = """
        import os, signal, torch
        import torch.distributed as dist
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        rank = int(os.fork() == 0)
        dist.init_process_group("gloo", init_method=f"file://{__file__}.store", rank=rank, world_size=2)
        if rank == 1:
            signal.pause()
        print(flush=True)
        dist.all_reduce(torch.ones(1))  # here
    """
    script = write(tmp_path, "train.py", source)
    dump_of(script, f"all_reduce at train.py:{line_of(script)}")


SITE = "/opt/venv/lib/python3.12/site-packages"

IN_ALL_REDUCE = f"""\
Thread 0x00007f576d7646c0 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait
  File "/usr/lib/python3.12/threading.py", line 1030 in _bootstrap

Current thread 0x00007f576e2c4b80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3195 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 40 in train
  File "/tmp/x/package.zip/distributor/rank/process.py", line 161 in _call
  File "/tmp/x/package.zip/distributor/rank/process.py", line 70 in main
  File "/tmp/x/package.zip/distributor/node/launcher.py", line 188 in _fork
  File "{SITE}/torch/distributed/elastic/agent/server/api.py", line 711 in run
  File "<string>", line 1 in <module>
"""
IN_LOADER = f"""\
Current thread 0x00007f576e2c4b80 (most recent call first):
  File "/usr/lib/python3.12/selectors.py", line 415 in select
  File "/usr/lib/python3.12/multiprocessing/connection.py", line 440 in _poll
  File "{SITE}/torch/utils/data/dataloader.py", line 1288 in _try_get_data
  File "{SITE}/torch/utils/data/dataloader.py", line 741 in __next__
  File "{SITE}/tqdm/std.py", line 1181 in __iter__
  File "/home/me/train.py", line 31 in train
"""
SILENT = "no answer within 5 s (state D: in the kernel)"


def stack(*frames, header="Current thread 0x00007f576e2c4b80 (most recent call first):"):
    return "\n".join([header, *(f'  File "{file}", line {line} in {function}' for file, line, function in frames), ""])


USER = ("/home/me/train.py", 40, "train")

TEXTS = {
    # Other Pythons.
    "3.10": (IN_ALL_REDUCE.replace("3.12", "3.10"), "all_reduce at train.py:40"),
    "3.12": (IN_ALL_REDUCE, "all_reduce at train.py:40"),
    "3.12, collecting garbage": (
        IN_ALL_REDUCE.replace("b80 (most recent call first):", "b80 (most recent call first):\n  Garbage-collecting"),
        "all_reduce at train.py:40",
    ),
    "3.13 without the lock of the interpreter": (
        "<Cannot show all threads while the GIL is disabled>\n"
        + stack(("/usr/lib/python3.13t/queue.py", 202, "get"), USER, header="Stack (most recent call first):"),
        "get at train.py:40",
    ),
    "3.14": (
        stack(("/usr/lib/python3.14/threading.py", 373, "wait"), header="Thread 0x1 [loader] (most recent call first):")
        + "\n"
        + stack(USER, header="Current thread 0x2 [python (a)] (most recent call first):"),
        "train at train.py:40",
    ),
    "extension modules": (
        stack(USER) + "\nExtension modules: numpy._core, torch._C (total: 2)\n",
        "train at train.py:40",
    ),
    "more than 100 threads, the main one listed": (stack(USER) + "\n...\n", "train at train.py:40"),
    # Which frame is the user's.
    "Debian's packages": (stack(("/usr/lib/python3/dist-packages/yaml/a.py", 1, "load"), USER), "load at train.py:40"),
    "packages in a folder": (
        stack(("/x/site-packages/a.py", 1, "f"), ("/x/dist-packages/a.py", 1, "g"), USER),
        "g at train.py:40",
    ),
    "64 bits": (stack(("/usr/lib64/python3.12/queue.py", 1, "get"), USER), "get at train.py:40"),
    "a notebook": (stack(("<command-17>", 3, "train"), ("<command-17>", 9, "<module>")), "train at <command-17>:3"),
    "generated code around": (stack(("<string>", 3, "f"), USER, ("<string>", 9, "<module>")), "f at train.py:40"),
    "frozen code": (
        stack(("<frozen importlib._bootstrap>", 241, "_call"), ("<command-17>", 3, "train")),
        "_call at <command-17>:3",
    ),
    "our own code": (stack(("/x/package.zip/distributor/errors.py", 7, "f"), USER), "f at train.py:40"),
    "nothing but libraries": (stack((f"{SITE}/a/b.py", 7, "f"), (f"{SITE}/a/c.py", 8, "g")), "f at b.py:7"),
    "a project of our name": (stack(("/home/me/distributor/train.py", 7, "f")), "f at train.py:7"),
    "a file of our names": (
        stack(("/usr/lib/python3.12/queue.py", 1, "get"), ("/home/me/my_distributor/rank.py", 7, "f")),
        "get at rank.py:7",
    ),
    "outside of the user's code": (
        stack(("/usr/lib/python3.12/threading.py", 1, "_shutdown"), ("/x/distributor/rank/process.py", 2, "_finalize"))
        + stack(("/home/me/launch.py", 1, "<module>"), header="").lstrip("\n"),
        "_shutdown at threading.py:1",
    ),
    "nothing but ours": (
        stack(
            ("/x/distributor/rank/process.py", 2, "main"),
            ("/x/distributor/node/launcher.py", 2, "main"),
            ("<string>", 1, "f"),
        ),
        "main at process.py:2",
    ),
    # Which call it stands in.
    "the loader in a progress bar": (IN_LOADER, "DataLoader at train.py:31"),
    "the loader that runs code of the user": (
        stack(
            ("/usr/lib/python3.12/queue.py", 1, "get"), USER, (f"{SITE}/torch/utils/data/dataloader.py", 1, "f"), USER
        ),
        "get at train.py:40",
    ),
    "the gradients": (
        stack(
            (f"{SITE}/torch/autograd/graph.py", 865, "_engine_run_backward"),
            (f"{SITE}/torch/_tensor.py", 630, "backward"),
            USER,
        ),
        "backward at train.py:40",
    ),
    "the optimizer": (
        stack(
            (f"{SITE}/torch/optim/adam.py", 248, "step"),
            (f"{SITE}/torch/optim/optimizer.py", 80, "_use_grad"),
            (f"{SITE}/torch/optim/optimizer.py", 530, "wrapper"),
            USER,
        ),
        "step at train.py:40",
    ),
    "a module of torch": (
        stack(
            (f"{SITE}/torch/nn/modules/linear.py", 134, "forward"),
            (f"{SITE}/torch/nn/modules/module.py", 1789, "_call_impl"),
            (f"{SITE}/torch/nn/modules/module.py", 1778, "_wrapped_call_impl"),
            USER,
        ),
        "forward at train.py:40",
    ),
    "more frames than Python lists": (
        stack(("/usr/lib/python3.12/queue.py", 1, "get"), *[USER] * 99) + "  ...\n",
        "get at train.py:40",
    ),
    "nothing but wrappers": (stack((f"{SITE}/a.py", 1, "wrapper"), USER), "train at train.py:40"),
    # No place.
    "no answer": (SILENT, SILENT),
    "several lines": (" a\n\tb\n", "a b"),
    "nothing": ("", "no answer"),
    "no frames": (stack() + "  <no Python frame>\n", "no Python frame"),
    "cut off before the first frame": (stack(USER).splitlines()[0], "no Python frame"),
    "cut off within a frame": (stack(("/usr/lib/python3.12/queue.py", 1, "get"), USER)[:-16], "get at queue.py:1"),
    "what Python does not know": (stack() + "  File ???, line ??? in ???\n", "??? at ???:0"),
    "a line that is no number": (stack() + f'  File "a", line {"9" * 5000} in f\n', "no Python frame"),
    "no thread that answered": (
        stack(("/home/me/a.py", 1, "f"), header="Thread 0x1 (most recent call first):")
        + "\n"
        + stack(USER, header="Thread 0x2 (most recent call first):"),
        "train at train.py:40",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_where(name):
    text, expected = TEXTS[name]
    assert stacks.where(text) == expected
    assert stacks.where(stacks.trim(text)) == expected


def test_parse():
    other, main = stacks.parse(IN_ALL_REDUCE)
    assert other == Thread(
        False,
        (
            Frame("/usr/lib/python3.12/threading.py", 355, "wait"),
            Frame("/usr/lib/python3.12/threading.py", 1030, "_bootstrap"),
        ),
    )
    assert main.current
    assert main.frames[2] == Frame("/home/me/train.py", 40, "train")
    assert stacks.parse(SILENT) == ()


def test_the_main_thread():
    threads = [Thread(current, (Frame("a.py", line, "f"),)) for current, line in ((False, 1), (True, 2), (False, 3))]
    assert stacks.main_thread(threads) is threads[1]
    assert stacks.main_thread(threads[:1] + threads[2:]) is threads[2]
    assert stacks.main_thread([]) is None


def test_trim():
    kept, _, _ = IN_ALL_REDUCE.partition('  File "/tmp/x/package.zip')
    assert stacks.trim(IN_ALL_REDUCE) == kept
    deep = IN_ALL_REDUCE.replace('  File "<string>", line 1 in <module>', "  ...")
    assert stacks.trim(deep + "\nExtension modules: a\n") == kept + "\nExtension modules: a\n"


@pytest.mark.parametrize("runpy", ["<frozen runpy>", "/usr/lib/python3.10/runpy.py"])
def test_trim_takes_what_runs_a_script(runpy):
    text = stack(USER, (runpy, 88, "_run_code"), (runpy, 98, "run_path"), ("distributor/rank/process.py", 1, "_call"))
    assert stacks.trim(text) == stack(USER)
    outside = stack(USER, (runpy, 88, "_run_code"))
    assert stacks.trim(outside) == outside


def test_trim_leaves_other_threads_whole():
    other = stack(("/x/distributor/rank/process.py", 1, "f"), USER, header="Thread 0x1 (most recent call first):")
    main = stack(USER, ("/x/distributor/rank/process.py", 1, "f"))
    for before, after in ((other + "\n", ""), ("", "\n" + other)):
        assert stacks.trim(before + main + after) == before + stack(USER) + after
    last = main.replace("Current thread", "Thread")
    assert stacks.trim(last + "\n" + last) == last + "\n" + stack(USER).replace("Current thread", "Thread")


def test_the_summary_groups_ranks():
    texts = {7: IN_LOADER, **dict.fromkeys((*range(6, -1, -1), 9), IN_ALL_REDUCE), 8: SILENT}
    assert stacks.summary(texts) == (
        f"ranks 0-6, 9 in all_reduce at train.py:40; rank 7 in DataLoader at train.py:31; rank 8: {SILENT}"
    )
    assert stacks.summary({}) == ""


def test_stacks_show_each_text_once():
    elsewhere = IN_ALL_REDUCE.replace("0x00007f57", "0x0000aaaa").replace("/tmp/x", "/tmp/y")
    found = Stacks({2: IN_LOADER, 1: elsewhere, 0: IN_ALL_REDUCE, 3: SILENT})
    assert found[1] == elsewhere
    assert str(found) == (
        "ranks 0-1 in all_reduce at train.py:40; rank 2 in DataLoader at train.py:31; "
        f"rank 3: {SILENT}\n\n"
        f"ranks 0-1:\n{stacks.trim(IN_ALL_REDUCE)}\n"
        f"rank 2:\n{IN_LOADER}\n"
        f"rank 3:\n{SILENT}"
    )
    assert str(Stacks()) == "no ranks are running"


def test_a_cell_is_named_as_the_notebook_names_it(monkeypatch):
    """As the driver takes it: ranks know a file."""
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/22.py", (9, None, ["x = 1\n", "    wait()\n"], "22.py"))
    compiler = SimpleNamespace(format_code_name=lambda path: ("Cell", "In[5]"))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=compiler)))
    text = (
        'Current thread 0x1 (most recent call first):\n  File "/opt/lib/python3.12/threading.py", line 3 in wait\n'
        '  File "/tmp/ipykernel_1/22.py", line 2 in train\n  File "/x/distributor/rank/process.py", line 1 in _call\n'
    )
    told = Stacks({0: cells.readable(text), 1: cells.readable(text)})
    assert str(told) == (
        "ranks 0-1 in wait at Cell In[5]:2\n\nranks 0-1:\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/opt/lib/python3.12/threading.py", line 3 in wait\n  Cell In[5], line 2 in train\n    wait()'
    )


def test_stacks_are_a_mapping_that_travels():
    found = Stacks({0: IN_LOADER})
    copy = pickle.loads(pickle.dumps(found))
    assert type(copy) is Stacks
    assert copy == found == {0: IN_LOADER}


LINES = st.one_of(
    st.sampled_from(
        [
            "Current thread 0x1 (most recent call first):",
            "Thread 0x2 (most recent call first):",
            "Thread 0x3 [name] (most recent call first):",
            "Stack (most recent call first):",
            "  <no Python frame>",
            "  ...",
            "...",
            "",
        ]
    ),
    st.builds(
        '  File "{}", line {} in {}'.format,
        st.sampled_from(
            [
                "/home/me/train.py",
                "/x/distributor/rank/process.py",
                "/x/distributor/node/launcher.py",
                "/x/distributor/shipping/pickling.py",
                f"{SITE}/torch/utils/data/dataloader.py",
                "/usr/lib/python3.10/runpy.py",
                "<frozen runpy>",
                "<string>",
            ]
        )
        | st.text(max_size=5),
        st.integers(-1, 10**12),
        st.sampled_from(["f", "wrapper", "<module>"]) | st.text(max_size=5),
    ),
    st.text(max_size=20),
)
LAUNCHED = '  File "/distributor/rank/process.py", line 0 in g'
DUMPS = st.lists(LINES, max_size=12).map("\n".join)


@given(st.text() | DUMPS | st.binary().map(lambda data: data.decode(errors="replace")))
@example('Current thread (most recent call first):\n  File "", line 0 in f\n' + 2 * f"{LAUNCHED}\n\n")
def test_any_text(text):
    place = stacks.where(text)
    assert place
    assert "\n" not in place
    trimmed = stacks.trim(text)
    assert stacks.where(trimmed) == place
    assert stacks.trim(trimmed) == trimmed
    assert len(stacks.parse(trimmed)) == len(stacks.parse(text))


@given(st.dictionaries(st.integers(0, 20), DUMPS, min_size=1))
def test_any_texts(texts):
    summary = stacks.summary(texts)
    shown = str(Stacks(texts))
    assert shown.startswith(summary + "\n\nrank")
    assert all(stacks.where(text) in summary for text in texts.values())
    assert all(stacks.trim(text).strip("\n") in shown for text in texts.values() if "0x" not in text)


def test_a_rank_that_waits_for_its_threads_is_where_they_are():
    text = """
Thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/me/train.py", line 6 in prefetch
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x3 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown
  File "/opt/lib/python3.11/site-packages/distributor/rank/process.py", line 400 in _finalize
"""
    told = "rank 0: the training code has ended, but a thread is still in wait at train.py:6"
    assert stacks.summary({0: text}) == told
    assert (
        stacks.summary({0: text.replace("/home/me", "/usr/lib/python3.11")})
        == "rank 0 in _shutdown at threading.py:1590"
    )
