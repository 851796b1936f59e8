"""The life of one rank, a process that starts as a fork or child of its node's launcher and reports its outcome.

A rank drops what it has inherited (descriptors, signal handlers, numpy's seed), so that user code sees what it would
see under ``python train.py``. Its exit code agrees with the outcome that it reports.
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
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn

from distributor.channel.rank_slots import Slot
from distributor.errors import GroupError, ResourceError, StartError
from distributor.machine import allocator
from distributor.machine.processes import die_with_parent, reseed
from distributor.metrics import autologging, rank as reports, trainers
from distributor.rank import (
    dataloaders,
    exit_barrier,
    groups,
    lasting_threads,
    lightning,
    lookups,
    main_module,
    shared_host,
    slow_import,
    spark,
    spawning,
)
from distributor.rank.group_check import GroupCheck
from distributor.rank.result import PATIENCE, RankResult, deadline
from distributor.shipping import modules, pickling
from distributor.stopping import rank as stopping
from distributor.text.wording import alone
from distributor.values import layout
from distributor.values.job import Function, Module, Script
from distributor.values.layout import ALL_STACKS_SIGNAL, MAIN_STACK_SIGNAL
from distributor.values.plan import Call, NodeOrder

_stacks: io.BufferedWriter | None = None

_exit = os._exit  # user code may replace os._exit

_runpy: Any = runpy  # its public functions put back another __main__ once the code has run

#: Classes, by module, whose files have an end of their own, in the order in which one may write into another.
_ARCHIVES = {"tarfile": "TarFile", "zipfile": "ZipFile", "gzip": "GzipFile", "bz2": "BZ2File", "lzma": "LZMAFile"}

_FAILED_PATIENCE = 2.0  # seconds that a failed rank's threads and exit callbacks have to finish


def main(path: str, local_rank: str, launcher_pid: str, slots: str) -> NoReturn:
    """Run a rank in a new process (entry point)."""
    with open(path, "rb") as file:
        order: NodeOrder = pickle.load(file)
    lookups.switch_off_on_import(order.folder)
    _live(order, int(local_rank), int(launcher_pid), int(slots))


def become(order: NodeOrder, local_rank: int, launcher_pid: int) -> NoReturn:
    """Turn a fresh fork of the launcher into a rank."""
    _live(order, local_rank, launcher_pid, order.slots_fd)


def _live(order: NodeOrder, local_rank: int, launcher_pid: int, slots: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(launcher_pid)
        result = RankResult(order, local_rank, Slot(slots, local_rank))
        os.close(slots)
        try:
            _leave_launcher(order, local_rank, order.plan.rank_env[local_rank])
            spark.refuse()
        except BaseException as error:
            result.raised(error)
            raise
        code = _run(order, local_rank, result)
        code = _finalize(code, result, order.plan.last, local_rank)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the user may have closed or replaced the stream
                continue
        _exit(code)


def _leave_launcher(order: NodeOrder, local_rank: int, env: Mapping[str, str]) -> None:
    """Drop what this process has inherited from the launcher, and set up the rank's own environment."""
    os.setsid()  # a signal that user code sends to its own process group reaches this rank only
    for number in (signal.SIGTERM, signal.SIGHUP, layout.STOP_SIGNAL, layout.FAST_KILL_SIGNAL):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # since Spark's JVM blocks SIGQUIT in its child processes
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    os.close(_open_log(order, local_rank, "uncaught"))  # created now, so that the agent need not keep looking for it
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        _redirect(_open_log(order, local_rank, stream), descriptor)
    _close_connections()
    global _stacks
    _stacks = open(layout.stacks(order.folder, local_rank), "ab")  # must stay open while faulthandler uses it
    faulthandler.register(ALL_STACKS_SIGNAL, file=_stacks, all_threads=True)
    faulthandler.register(MAIN_STACK_SIGNAL, file=_stacks, all_threads=False)
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True)
    os.environ.update(env)
    path = layout.rank_log(order.folder, local_rank, "reports")
    reports.begin(path, order.placement.world_size, int(env.get("TORCHELASTIC_RESTART_COUNT", 0)))
    if local_rank not in order.plan.serving_here:  # a parameter server ends after the other ranks
        stopping.begin(layout.vote_file(order.folder), local_rank, dataloaders.is_worker)
    if order.plan.keep_memory:
        allocator.keep_memory(os.environ)
    dataloaders.keep_sockets(order.folder, local_rank)
    if order.cwd is not None:
        os.chdir(order.cwd)
    sys.path[:] = order.sys_path
    sys.argv = [""]
    tempfile.tempdir = None  # the launcher has chosen one already, in another environment
    reseed()


def _open_log(order: NodeOrder, local_rank: int, stream: str) -> int:
    return os.open(layout.rank_log(order.folder, local_rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _close_connections() -> None:
    """Close inherited pidfds, and sockets, which would keep the launcher's ports in use.

    Other descriptors stay open: code that still uses their numbers would reach files of the rank instead. For example,
    libuv's fork handler writes to its signal pipe, and ``std::random_device`` reads from ``/dev/urandom``.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "anon_inode:[pidfd]")):
                os.close(int(name))
        except OSError:  # the descriptor of the listing itself
            continue


def _redirect(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def _run(order: NodeOrder, local_rank: int, result: RankResult) -> int:
    """Run the target, report how it ended, and return the exit code."""
    rank = order.plan.node.first_rank + local_rank
    lightning.Fitting(order.placement, rank, local_rank).watch()
    shared_host.warn(order.placement, local_rank)
    groups.watch(order.placement.world_size)
    spawning.watch(rank)
    dataloaders.keep_workers()
    trainers.watch()
    if order.tracked is not None:
        autologging.leave_to_driver(order.tracked, rank)
    slow_import.watch(order.imported, local_rank)
    ungrouped = GroupCheck(order.placement.world_size)
    if order.require_group is not False:
        ungrouped.watch()
    try:
        try:
            for call in (order.gpu_check, order.check, order.plan.first):
                _call_ours(call, local_rank)
            result.called()
            value = _returned(order, local_rank)
        finally:
            _calm_signal_handlers()
            reports.finish()
        if order.require_group and (framework := ungrouped.missed) is not None:
            raise GroupError(alone(framework, order.placement.world_size))
    except SystemExit as stop:
        code, text = _exit_status(stop)
        if code:
            result.exited(code, text)
        if text:
            print(text, file=sys.stderr)
        return code
    except BaseException as error:
        error.with_traceback(_user_frames(error.__traceback__))  # a frozen dataclass refuses an assignment
        text = result.raised(error)
        if isinstance(error, StartError | ResourceError):  # the driver raises it: its sentence says all
            return 1
        with deadline(PATIENCE, partial(_exit, 1)):
            _print(order, local_rank, error, text, is_rank=result.is_mine)
        return 1
    result.returned(value, ungrouped.missed)
    return 0


def _print(order: NodeOrder, local_rank: int, error: BaseException, text: str, *, is_rank: bool) -> None:
    """Print an exception as the interpreter does, or write it to a file, from which the driver shows it in its error.

    It is printed if the user has set ``sys.excepthook`` or redirected stderr, and in a fork of the rank.
    """
    hook = _without_torch(sys.excepthook)
    is_redirected = sys.stderr is not sys.__stderr__ or not _is_stderr(2, order, local_rank)
    if not is_rank or hook is not sys.__excepthook__ or is_redirected:
        hook(type(error), error, error.__traceback__)
        return
    with suppress(OSError), open(_open_log(order, local_rank, "uncaught"), "wb") as file:
        file.write(text.encode(errors="backslashreplace"))


def _is_stderr(descriptor: int, order: NodeOrder, local_rank: int) -> bool:
    """Return whether a descriptor still leads to the rank's log file for stderr."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(layout.rank_log(order.folder, local_rank, "stderr")))
    except OSError:
        return False


def _without_torch(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the exception hook that torch has replaced by its own, which puts ``[rank1]: `` before each line.

    Source: ``torch.distributed.distributed_c10d._distributed_excepthook``, a closure over ``old_hook``.
    """
    while getattr(hook, "__name__", "") == "_distributed_excepthook":
        inner = inspect.getclosurevars(hook).nonlocals.get("old_hook")
        if inner is None:
            break
        hook = inner
    return hook


def _calm_signal_handlers() -> None:
    """Suppress exceptions of the user's signal handlers, which could prevent the report of the outcome.

    For example, torch's data loader raises an exception from its SIGCHLD handler if one of its workers has failed.
    """
    for number in signal.valid_signals():
        for _ in range(2):  # each call first runs pending handlers, which may raise
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
    except SystemExit:  # the handler asks to exit: allowed, but later, so that the outcome is written first
        _end_soon(1)
    except BaseException:
        pass


def _returned(order: NodeOrder, local_rank: int) -> Any:
    """Run the user's code, and return its value; ``None`` if it exits with code 0, as scripts may do at their end."""
    try:
        return _call(order, local_rank)
    except SystemExit as stop:
        if _exit_status(stop)[0] == 0:
            return None
        raise


def _exit_status(stop: SystemExit) -> tuple[int, str]:
    """Return the exit code for ``sys.exit``, as Python and the system cut it to 8 bits, and the text to print."""
    if stop.code is None or isinstance(stop.code, int):
        code = stop.code or 0
        return (code & 0xFF if code.bit_length() < 64 else 0xFF), ""
    return 1, str(stop.code)


def _call(order: NodeOrder, local_rank: int) -> Any:
    target = order.plan.target
    if isinstance(target, Function):
        sys.argv += target.argv
        function, args, kwargs = pickling.load_function(layout.call(order.folder))
        main_module.become(order.folder, local_rank)
        return function(*args, **kwargs)
    if isinstance(target, Module):
        sys.argv = [target.name, *target.argv]
        if modules.find(target.name) is None:
            raise ModuleNotFoundError(f"No module named {target.name!r}", name=target.name)
        _, spec, code = _runpy._get_module_details(target.name)
        sys.argv[0] = spec.origin
        _runpy._run_code(code, vars(main_module.anew()), None, "__main__", spec)
        return None
    path = script_path(order, target)
    sys.argv = [path, *target.argv]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    _runpy._run_code(code, vars(main_module.anew()), None, "__main__", script_name=path)
    return None


def _call_ours(call: Call | None, local_rank: int) -> None:
    """Call the function of this package that a plan names."""
    if call is not None:
        getattr(importlib.import_module(call.module), call.function)(**call.arguments, local_rank=local_rank)


def script_path(order: NodeOrder, script: Script) -> str:
    """Return the script's path: in the node's working directory, as a copy of its own, or the driver's file."""
    if script.inside is not None and order.cwd is not None:
        return os.path.join(order.cwd, script.inside)
    shipped = layout.script(order.folder, script)
    return str(shipped) if shipped.exists() else script.path


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's first frame on; ``None`` if the target could not be loaded or called."""
    ours = (__file__, pickling.__file__, runpy.__file__, "<frozen runpy>")
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename in ours:
        rest = rest.tb_next
    return rest


def _end_soon(code: int, patience: float = _FAILED_PATIENCE) -> None:
    end = threading.Timer(patience, _exit, (code,))
    end.daemon = True
    end.start()


def _complete_files() -> None:
    """Complete files that are still open, the outermost first, as the interpreter does when it deletes globals."""
    archives = [getattr(sys.modules[module], kind) for module, kind in _ARCHIVES.items() if module in sys.modules]
    kinds = (io.TextIOWrapper, *archives, io.BufferedWriter)
    # isinstance would ask the object's own __class__, which may run user code
    left = [item for item in gc.get_objects() if issubclass(type(item), kinds)]
    for kind in kinds:
        for item in left:
            if issubclass(type(item), kind):
                with suppress(Exception):  # the file or its pipe is closed
                    item.close() if kind in archives else item.flush()


def _finalize(code: int, result: RankResult, last: Call | None, local_rank: int) -> int:
    """Do what the interpreter does at exit: wait for threads, run exit callbacks and flush files that are still open.

    A rank that has failed has :data:`_FAILED_PATIENCE` seconds, because the others wait for it in collectives.
    """
    if code != 0 and result.is_mine:
        _end_soon(code)
    with deadline(lasting_threads.PATIENCE, lasting_threads.warn) if result.is_mine else nullcontext():
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if code == 0 and result.is_mine:
        _call_ours(last, local_rank)
    _complete_files()
    ctypes.CDLL(None).fflush(None)  # flushes what C and C++ extensions have printed
    if code == 0 and result.is_mine:
        with suppress(RuntimeError):  # without a thread, there is no time limit: do not wait
            _end_soon(code, exit_barrier.PATIENCE)
            exit_barrier.await_others()
    return code
