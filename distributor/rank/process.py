"""Inside one rank: from a fork or a child of the launcher to what ``python train.py`` would see, then the outcome.

A rank leaves the launcher's state behind (descriptors, signal handlers, numpy's seed), runs the function, script or
module, and writes what came of it into files of the node's folder before it exits with the truth as its code.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import inspect
import io
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn

from distributor.machine import allocator
from distributor.machine.processes import die_with_parent
from distributor.rank import lookups, parting
from distributor.shipping import modules, payload
from distributor.values import layout
from distributor.values.job import Function, Module, Script
from distributor.values.layout import ALL_STACKS_SIGNAL, MAIN_STACK_SIGNAL
from distributor.values.outcome import Failure, Outcome
from distributor.values.plan import NodeOrder

_stacks: io.BufferedWriter | None = None

#: Seconds that a failed rank's threads and exit callbacks get.
_FAILED_PATIENCE = 2.0


def main(path: str, local_rank: str, launcher_pid: str) -> NoReturn:
    """Entry point of a rank that is started anew."""
    with open(path, "rb") as file:
        order: NodeOrder = pickle.load(file)
    lookups.switch_off_on_import(order.folder)
    _live(order, int(local_rank), int(launcher_pid))


def become(order: NodeOrder, local_rank: int, launcher_pid: int) -> NoReturn:
    """Makes a fresh fork of the launcher a rank; never returns to its caller."""
    with suppress(OSError):
        os.close(order.event_fd)
    _live(order, local_rank, launcher_pid)


def _live(order: NodeOrder, local_rank: int, launcher_pid: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(launcher_pid)
        env = order.plan.rank_env[local_rank]
        _leave_launcher(order, local_rank, env)
        code = _run(order, local_rank, int(env["RANK"]))
        code = _finalize(code)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the user may have closed or replaced it
                continue
        os._exit(code)


def _leave_launcher(order: NodeOrder, local_rank: int, env: Mapping[str, str]) -> None:
    """Makes this process what one would be that has nothing to do with the launcher."""
    os.setsid()  # a signal that user code sends to its own group stays within the rank
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Spark's JVM blocks SIGQUIT in what it starts
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    os.close(_open_log(order, local_rank, "uncaught"))  # now, so that the agent need not look for it all the time
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        _redirect(_open_log(order, local_rank, stream), descriptor)
    _close_connections()
    global _stacks
    _stacks = open(layout.stacks(order.folder, local_rank), "ab")  # faulthandler only borrows it
    faulthandler.register(ALL_STACKS_SIGNAL, file=_stacks, all_threads=True)
    faulthandler.register(MAIN_STACK_SIGNAL, file=_stacks, all_threads=False)
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True)
    os.environ.update(env)
    if order.plan.keep_memory:
        allocator.keep_memory(os.environ)
    if order.cwd is not None:
        os.chdir(order.cwd)
    sys.path[:] = order.sys_path
    sys.argv = [""]
    # Python reseeds its own generator at fork, others do not: all ranks would draw the same "random" numbers.
    numpy_random = sys.modules.get("numpy.random")  # numpy 2 loads it on first use, older ones at once
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _open_log(order: NodeOrder, local_rank: int, stream: str) -> int:
    return os.open(layout.rank_log(order.folder, local_rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _close_connections() -> None:
    """Closes the launcher's sockets and process descriptors: they would keep its ports open.

    Nothing else: code without a destructor to tell it may still use the number, which something of the rank's would
    have by then. libuv's fork handler writes to its signal pipe, ``std::random_device`` reads from ``/dev/urandom``.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "anon_inode:[pidfd]")):
                os.close(int(name))
        except OSError:  # the listing's own
            continue


def _redirect(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def _run(order: NodeOrder, local_rank: int, rank: int) -> int:
    """Runs the target and writes its outcome; returns the exit code."""
    called = time.time()
    try:
        try:
            value = _call(order, local_rank)
        finally:
            _calm_signal_handlers()
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            _write(order, local_rank, _failure(order, local_rank, rank, "exit", f"exited with code 1: {stop.code}"))
            print(stop.code, file=sys.stderr)
            return 1
        code = (stop.code or 0) & 0xFF  # what the system keeps of an exit code
        if code != 0:
            return code
        value = None
    except BaseException as error:
        error.__traceback__ = _user_frames(error.__traceback__)
        text = printed(error)
        summary = _summary(error)
        _write(
            order,
            local_rank,
            _failure(
                order,
                local_rank,
                rank,
                type(error).__name__,
                summary,
                text,
                payload.dump_exception(error),
            ),
        )
        _print(order, local_rank, error, text)
        return 1
    returned = time.time()
    outcome = _return(order, local_rank, rank, value)
    _write(order, local_rank, replace(outcome, called=called, returned=returned))
    return 0


def _print(order: NodeOrder, local_rank: int, error: BaseException, text: str) -> None:
    """Has an exception printed, as the interpreter does at the end of a program that raised it.

    What Python prints goes into a file of its own: the driver shows it once, as part of the error that it raises. A
    hook of the user's (``sys.excepthook``) says what it likes on stderr, as live as all else.

    Args:
        order: the node's.
        local_rank: of this rank.
        error: what it raised.
        text: what Python prints of that.
    """
    hook = _without_torch(sys.excepthook)
    if hook is not sys.__excepthook__ or not _is_stderr(2, order, local_rank):
        hook(type(error), error, error.__traceback__)
        return
    with suppress(OSError), open(_open_log(order, local_rank, "uncaught"), "wb") as file:
        file.write(text.encode(errors="backslashreplace"))


def _is_stderr(descriptor: int, order: NodeOrder, local_rank: int) -> bool:
    """Whether a descriptor is still where it led when the rank began."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(layout.rank_log(order.folder, local_rank, "stderr")))
    except OSError:
        return False


def _without_torch(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook that was there before ``init_process_group`` put its own around it, which prefixes ``[rank1]: ``.

    Source: ``torch.distributed.distributed_c10d._distributed_excepthook``, a closure over ``old_hook``.
    """
    while getattr(hook, "__name__", "") == "_distributed_excepthook":
        inner = inspect.getclosurevars(hook).nonlocals.get("old_hook")
        if inner is None:
            break
        hook = inner
    return hook


def _calm_signal_handlers() -> None:
    """Lets no signal handler of the user's raise any more: what the target came to is not to be lost on its way.

    torch's data loader, for one, raises from its handler of SIGCHLD, wherever the main thread happens to be.
    """
    for number in signal.valid_signals():
        for _ in range(2):  # the call runs what is pending, which may raise, before it sets anything
            try:
                handler = signal.getsignal(number)
                if callable(handler):
                    signal.signal(number, partial(_handle_calmly, handler))
                break
            except BaseException:
                continue


def _handle_calmly(handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
    try:
        handler(number, frame)
    except SystemExit:  # it wants to end, but not before it has told what it came to
        _end_soon(1)
    except BaseException:
        pass


def _call(order: NodeOrder, local_rank: int) -> Any:
    plan, target = order.plan, order.plan.target
    if plan.first is not None:
        first = getattr(importlib.import_module(plan.first.module), plan.first.function)
        first(**plan.first.arguments, local_rank=local_rank)
    if isinstance(target, Function):
        function, args, kwargs = payload.load_function(target.pickled)
        return function(*args, **kwargs)
    if isinstance(target, Module):
        sys.argv = [target.name, *target.argv]
        if modules.find(target.name) is None:
            raise ModuleNotFoundError(f"No module named {target.name!r}", name=target.name)
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)
        return None
    path = script_path(order, target)
    sys.argv = [path, *target.argv]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    runpy.run_path(path, run_name="__main__")
    return None


def script_path(order: NodeOrder, script: Script) -> str:
    """The file that a rank runs: in the working directory, the driver's own where that is, or the shipped copy."""
    if script.inside is not None and order.cwd is not None:
        return os.path.join(order.cwd, script.inside)
    shipped = layout.script(order.folder, script)
    return str(shipped) if shipped.exists() else script.path


def _return(order: NodeOrder, local_rank: int, rank: int, value: Any) -> Outcome:
    """The outcome of a rank that returned; its value goes into a file of its own, streamed."""
    if rank == 0 or order.collect_all:
        path = layout.value(order.folder, rank)
        try:
            with open(path.with_suffix(".partial"), "wb") as file:
                payload.dump_value(value, file)
        except Exception as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            message = f"its return value of type {kind} cannot be pickled ({type(error).__name__}: {error})"
            path.with_suffix(".partial").unlink(missing_ok=True)
            return Outcome(rank, order.host, "unreturned", _failure(order, local_rank, rank, kind, message).failure)
        path.with_suffix(".partial").replace(path)
    return Outcome(rank, order.host, "finished")


def _failure(
    order: NodeOrder,
    local_rank: int,
    rank: int,
    kind: str,
    message: str,
    text: str = "",
    exception: bytes | None = None,
) -> Outcome:
    failure = Failure(
        rank, local_rank, order.host, kind, message, text, exit_code=1, time=time.time(), exception=exception
    )
    return Outcome(rank, order.host, "failed", failure)


def _write(order: NodeOrder, local_rank: int, outcome: Outcome) -> None:
    payload.write_atomically(layout.outcome(order.folder, local_rank), pickle.dumps(outcome))


def _summary(error: BaseException) -> str:
    """Type and message in one line, without notes."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = ["<its text cannot be made>"]
    return f"{name}: {lines[0]}" if lines else name


def printed(error: BaseException) -> str:
    """What Python prints of an exception.

    Until Python 3.12, the module ``traceback`` leaves out what may have been meant (``Did you mean: 'print'?``).
    """
    if sys.version_info >= (3, 12) or not isinstance(error, (AttributeError, NameError)):
        return "".join(traceback.format_exception(error))
    with redirect_stderr(io.StringIO()) as text:
        sys.__excepthook__(type(error), error, error.__traceback__)
    return text.getvalue() or "".join(traceback.format_exception(error))


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is the user's: without this module, the unpickling and ``runpy``.

    ``None`` if there is none: what is to be run could not be had, or not be called.
    """
    ours = (__file__, payload.__file__, runpy.__file__, "<frozen runpy>")
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename in ours:
        rest = rest.tb_next
    return rest


def _end_soon(code: int, patience: float = _FAILED_PATIENCE) -> None:
    end = threading.Timer(patience, os._exit, (code,))
    end.daemon = True
    end.start()


def _finalize(code: int) -> int:
    """What the interpreter does at its end: waits for threads, runs exit callbacks, flushes what is still open.

    A rank that failed has no time for threads that do not end: the others wait in collectives for it. One that returned
    has some for the others.
    """
    if code != 0:
        _end_soon(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for item in gc.get_objects():
        if issubclass(type(item), (io.TextIOWrapper, io.BufferedWriter)):  # isinstance would ask objects for a class
            try:
                item.flush()
            except Exception:  # closed, or its pipe is
                continue
    ctypes.CDLL(None).fflush(None)  # what C and C++ extensions have printed
    if code == 0:
        _end_soon(code, parting.PATIENCE)
        parting.await_others()
    return code
