"""Spark sessions, classic and Connect: which one is active, its settings, and how to create one."""

from __future__ import annotations

import enum
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from distributor.errors import ConfigurationError, DistributorError
from distributor.schedulers.spark import java
from distributor.text import cells, notices, wording

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


_JVM_PATIENCE = 5.0  # seconds that the JVM gets to clean up
_SPARKS_PYTHON = "python3"  # of classic sessions' workers, by default

#: For the Python of Arrow's workers, and of all workers of a Connect session, internal since Spark 3.5:
#: https://github.com/apache/spark/blob/v3.5.0/sql/catalyst/src/main/scala/org/apache/spark/sql/internal/SQLConf.scala
_ARROW_PYTHON = "spark.sql.execution.pyspark.python"

_BAR_INTERVAL = 0.2  # seconds between two calls that hide Spark's progress bar
_BAR_ORDER = 10.0  # seconds for which one call hides it


def active_session() -> SparkSession | None:
    """Return the session, classic or Connect, that is active in this process, if any. Never create one."""
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    try:
        active = SparkSession.getActiveSession()
    except Exception:  # the session's JVM has ended; check_alive() says so in an error
        active = None
    if active is not None and is_connect(active):
        return active
    # The active session belongs to the thread, the default session to the process. In a process that has started a
    # Connect server, the classic default session is the server's own.
    classic = active or (None if is_remote() else SparkSession._instantiatedSession)
    if classic is not None and classic.sparkContext._jsc is not None:
        return classic
    # Importing pyspark.sql.connect also imports pandas and grpc. A process with a Connect session has done so.
    connect = sys.modules.get("pyspark.sql.connect.session")
    if connect is None:
        return None
    remote = connect.SparkSession.getActiveSession() or connect.SparkSession._default_session
    return cast("SparkSession | None", remote)


class Life(enum.Enum):
    """Whether a session can run jobs."""

    ALIVE = "it can"
    STOPPED = "this program has stopped it"
    HALTED = "its context was stopped, by this program or by Spark"
    DEAD = "its JVM has ended"


def life_of(session: SparkSession) -> Life:
    """Return whether a session can run jobs. The server of a Connect session is not asked."""
    if is_connect(session):
        return Life.ALIVE
    java = session.sparkContext._jsc
    if java is None:
        return Life.STOPPED
    try:
        return Life.HALTED if java.sc().isStopped() else Life.ALIVE
    except Exception:  # py4j may raise anything if the JVM does not answer
        return Life.STOPPED if session.sparkContext._jsc is None else Life.DEAD


def check_alive(session: SparkSession) -> None:
    """Raise ConfigurationError if a session's context was stopped, or if its JVM has ended."""
    life = life_of(session)
    if life is Life.ALIVE:
        return
    which = f"the active Spark session (master {master_of(session)})"
    if life is Life.DEAD:
        raise ConfigurationError(
            f"{which} cannot be used: its JVM has ended (killed, out of memory, or crashed). Restart Python or the "
            "notebook's kernel, or pass local_mode=True to train on this machine"
        )
    raise ConfigurationError(
        f"{which} cannot be used: its context was stopped (Spark's log on the driver says why if you did not stop it). "
        "Call this session's stop(), because getOrCreate() may otherwise return it again. Then create a new session "
        "with SparkSession.builder.getOrCreate()"
    )


@contextmanager
def answering() -> Iterator[None]:
    """Raise ConfigurationError if a call to Spark in the ``with`` block fails or gives a strange answer."""
    try:
        yield
    except DistributorError:
        raise
    except Exception as error:
        raise ConfigurationError(f"the active Spark session cannot be used: {_first_words(error)}") from error


def driver_gpus() -> tuple[str, ...] | None:
    """Return the addresses of GPUs that Spark discovered for the driver; ``None`` without a classic context or GPUs."""
    gpus = None
    with suppress(Exception):  # its JVM has ended, or this is the Connect client without a JVM
        from pyspark import SparkContext

        context = SparkContext._active_spark_context
        gpus = context.resources.get("gpu") if context is not None else None
    return tuple(gpus.addresses) if gpus is not None else None


def is_connect(session: SparkSession) -> bool:
    """Return whether a session talks to a Spark Connect server."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def master_of(session: SparkSession) -> str:
    """Return a session's master URL. Users can change ``spark.master`` in a classic session later."""
    if is_connect(session):
        return str(session.conf.get("spark.master", ""))
    return str(session.sparkContext.master)


def is_cluster(session: SparkSession) -> bool:
    """Return whether executors run a session's tasks, and not the driver's JVM. Connect counts as a cluster."""
    return is_connect(session) or has_executors(master_of(session))


def has_executors(master: str) -> bool:
    """Return whether executors run the tasks of a classic session with this master, and not the driver's JVM.

    >>> has_executors("local-cluster[2,1,1024]"), has_executors("local[4]")
    (True, False)
    """
    return re.match(r"local(\[|$)", master) is None


def is_on_this_machine(master: str) -> bool:
    """Return whether all tasks of a classic session with this master run on the driver's machine.

    >>> is_on_this_machine("local-cluster[2,1,1024]"), is_on_this_machine("spark://host:7077")
    (True, False)
    """
    return re.match(r"local(\[|$|-cluster\[)", master) is not None


def submitted_master() -> str:
    """Return the master URL with which spark-submit has started this program. Create no session."""
    try:
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()  # connects to the JVM, whose settings SparkConf reads
        return str(SparkConf().get("spark.master"))
    except Exception as error:
        raise ConfigurationError(f"spark-submit does not say which master it uses: {_first_words(error)}") from None


#: Of started contexts, which do not change: by context and key.
_settings: WeakKeyDictionary[Any, dict[str, str | None]] = WeakKeyDictionary()


def conf(session: SparkSession, key: str, default: str | None = None) -> Any:
    """Return the value of a setting: for a classic session, the value with which its context was started."""
    if is_connect(session):
        return session.conf.get(key, default)
    known = _settings.setdefault(session.sparkContext, {})
    if key not in known:
        known[key] = session.sparkContext._conf.get(key)  # getConf() would copy all, one JVM call each
    return default if known[key] is None else known[key]


def task_python(master: str, environ: Mapping[str, str], configured: str | None, driver: str) -> str | None:
    """Return the Python that tasks must run if it is not the one that Spark would choose; ``None`` to let Spark choose.

    Spark takes PYSPARK_PYTHON, or else ``python3`` from PATH; it reads spark.pyspark.python (``configured``) in
    ``spark-submit`` only. For tasks on this machine, the driver's Python is better: it has the packages that the user
    installed.

    >>> task_python("local[4]", {}, None, "/venv/bin/python")
    '/venv/bin/python'
    >>> task_python("spark://host:7077", {}, None, "/venv/bin/python") is None
    True
    >>> task_python("local[4]", {"PYSPARK_PYTHON": "python3.12"}, None, "/venv/bin/python") is None
    True
    """
    if environ.get("PYSPARK_PYTHON"):
        return None
    if configured:
        return configured
    return driver if is_on_this_machine(master) and driver and not environ.get("PYSPARK_DRIVER_PYTHON") else None


def elements(sequence: Any) -> list[Any]:
    """Return the elements of one of Scala's sequences."""
    return [sequence.apply(index) for index in range(sequence.size())]


def context_for_tasks(session: SparkSession) -> SparkContext:
    """Return a classic session's context for tasks that run the Python of :func:`task_python`.

    It may be a second object for the same context in the JVM: the first keeps the Python of the user's own jobs.
    """
    context = session.sparkContext
    python = task_python(master_of(session), os.environ, conf(session, "spark.pyspark.python"), sys.executable)
    if python is None or context.pythonExec != _SPARKS_PYTHON:
        return context
    return _with_python(context, python)


def _with_python(context: SparkContext, python: str) -> SparkContext:
    """Return a second object for a context, with another Python; the same one if PySpark's contexts have changed."""
    try:
        view = type(context).__new__(type(context))
        vars(view).update(vars(context), pythonExec=python)
        if vars(view).keys() == vars(context).keys() and view.defaultParallelism == context.defaultParallelism:
            return view
    except Exception as error:
        notices.logger.debug("no second SparkContext: %s", error)
    text = "this PySpark has another SparkContext than expected, so executors run %s: set spark.pyspark.python to %s"
    notices.logger.warning(text, context.pythonExec, python)
    return context


def set_connect_python(session: SparkSession) -> None:
    """Let workers of a Connect server that this process started, as by ``remote("local[4]")``, use :func:`task_python`.

    The setting belongs to the session, and stays after the run; a value that the user has set is not changed. A server
    that this process did not start chooses by itself, even on this machine: it may run in a container.
    """
    if "SPARK_LOCAL_REMOTE" not in os.environ or session.conf.get(_ARROW_PYTHON, None):
        return
    configured = session.conf.get("spark.pyspark.python", None)
    python = task_python(master_of(session), os.environ, configured, sys.executable)
    if python is not None:
        session.conf.set(_ARROW_PYTHON, python)


def keep_arrow_python(session: SparkSession) -> bool:
    """Let all further queries of a session, such as a lazy DataFrame's, run the Python of :func:`task_python`.

    Return whether that has changed the settings of a classic session.
    """
    if is_connect(session):
        set_connect_python(session)
        return False
    python = task_python(master_of(session), os.environ, conf(session, "spark.pyspark.python"), sys.executable)
    if python is None or session.conf.get(_ARROW_PYTHON, None):
        return False
    session.conf.set(_ARROW_PYTHON, python)
    return True


@contextmanager
def arrow_python(session: SparkSession) -> Iterator[None]:
    """Let a session's queries in the ``with`` block run the Python of :func:`task_python`."""
    changed = keep_arrow_python(session)
    try:
        yield
    finally:
        if changed:
            session.conf.unset(_ARROW_PYTHON)


def users_call() -> str:
    """Return which function of this package the user has called, and where, such as ``run at train.py:12``."""
    frame: FrameType | None = sys._getframe()
    function = ""
    while frame is not None and (module := str(frame.f_globals.get("__name__"))).startswith("distributor."):
        if module.startswith("distributor.cli."):
            return "distributor run"
        function, frame = frame.f_code.co_name, frame.f_back
    if frame is None:
        return function
    file = cells.name(frame.f_code.co_filename) or os.path.basename(frame.f_code.co_filename)
    return f"{function} at {file}:{frame.f_lineno}"


@contextmanager
def named(context: SparkContext, call: str) -> Iterator[None]:
    """Let Spark's pages name this thread's jobs by the user's call; PySpark would name the start of the thread."""
    with ExitStack() as named_by_pyspark:
        try:
            from pyspark.traceback_utils import SCCallSiteSync

            site: Any = SCCallSiteSync
            named_by_pyspark.enter_context(site(context))  # within, PySpark sets no other name
            cast(Any, context)._jsc.setCallSite(call)
        except Exception as error:  # another PySpark
            notices.logger.warning(
                "Spark's pages cannot name the run's jobs by the user's call (%s)", _first_words(error)
            )
        yield


@contextmanager
def without_bar(session: SparkSession) -> Iterator[None]:
    """Hide Spark's progress bar (``[Stage 0:> ...``) within a ``with`` block.

    The bar does not end its line, and shows nothing useful about one long stage. Spark shows it again when any job of
    the session ends (``finishAll``), so a thread keeps hiding it. After the run, it comes back by itself.
    """
    bar = cast(Any, session).sparkContext._jsc.sc().progressBar()
    if bar.isEmpty():
        yield
        return
    ended = threading.Event()

    def keep_away() -> None:
        with suppress(Exception):  # Spark's context was stopped
            while not ended.wait(_BAR_INTERVAL):
                _hide_bar(bar.get())

    if not _can_hide(bar):
        yield
        return
    keeper = threading.Thread(target=keep_away, name="distributor-bar", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join(_JVM_PATIENCE)
        with suppress(Exception):
            bar.get().finishAll()


def _can_hide(bar: Any) -> bool:
    try:
        _hide_bar(bar.get())
    except Exception as error:
        text = "Spark's progress bar cannot be hidden (%s), so it may break log lines: set %s to false"
        notices.logger.warning(text, _first_words(error), "spark.ui.showConsoleProgress")
        return False
    return True


def _hide_bar(bar: Any) -> None:
    """Clear Spark's progress bar and hide it for ten seconds.

    ``refresh`` draws no bar until half a second after ``lastFinishTime``. Source:
    https://github.com/apache/spark/blob/v4.0.0/core/src/main/scala/org/apache/spark/ui/ConsoleProgressBar.scala
    """
    bar.finishAll()
    field = bar.getClass().getDeclaredField("lastFinishTime")
    field.setAccessible(True)
    field.setLong(bar, int((time.time() + _BAR_ORDER) * 1000))


def _start_java(settings: Mapping[str, str]) -> None:
    """Start Spark's JVM as Spark would, but in a new operating-system session (setsid).

    Spark shields its JVM from SIGINT only. A SIGTERM to the process group, as from ``timeout`` or a batch system, would
    end it and all executors before ranks have had their grace period.
    """
    from pyspark import SparkConf, SparkContext, __version__
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is None:
        if "PYSPARK_GATEWAY_PORT" not in os.environ and (reason := java.problem(__version__)) is not None:
            raise RuntimeError(reason)
        conf = SparkConf().setAll(list(settings.items()))
        gateway = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway, conf=conf)


def end_java() -> None:
    """End the JVM that :func:`create` has started, if any. A signal handler may call this at any point."""
    gateway = getattr(getattr(sys.modules.get("pyspark"), "SparkContext", None), "_gateway", None)
    jvm = getattr(gateway, "proc", None)
    if jvm is not None:
        jvm.terminate()
        with suppress(subprocess.TimeoutExpired):
            jvm.wait(_JVM_PATIENCE)
        jvm.kill()


def create(master: str | None, settings: Mapping[str, str]) -> SparkSession:
    """Create a session, or return the active one. Signals to this process group do not reach a new JVM."""
    from pyspark import __version__
    from pyspark.sql import SparkSession

    remote = master is not None and master.startswith("sc://")
    try:
        builder: Any = SparkSession.builder.appName("distributor")
        if master is not None:
            builder = builder.remote(master) if remote else builder.master(master)
        for name, value in settings.items():
            builder = builder.config(name, value)
        if not remote and "SPARK_REMOTE" not in os.environ:
            _start_java({**settings, **({} if master is None else {"spark.master": master})})
        session: SparkSession = builder.getOrCreate()
        return session
    except Exception as error:
        if "on a stopped SparkContext" in str(error):  # Spark's log says why the context stopped
            error = RuntimeError(
                "Spark's context stopped while it was starting; Spark's log above says why (is a master running there?)"
            )
        where = "" if master is None else f" with master {wording.without_token(master)}"
        elsewhere = remote or os.environ.get("SPARK_REMOTE", "").startswith("sc://")
        reason = (None if elsewhere else java.other_spark(__version__)) or wording.without_token(_first_words(error))
        raise ConfigurationError(f"no Spark session{where}: {reason}") from None


def _first_words(error: Exception) -> str:
    """Return Spark's message about an error, without the Java stack.

    >>> _first_words(RuntimeError("An error occurred while calling None.a.B.\\n: a.b.SparkException: no\\n\\tat a.b.C"))
    'no'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\tat ")]
    words = re.sub(r"^An error occurred while calling \S+ : ", "", " ".join(lines[:2]))
    return re.sub(r"^(?:[\w.$]+(?:Exception|Error): )+", "", words) or repr(error)
