"""The public API: checks the request, builds a :class:`Job` and chooses a scheduler."""

from __future__ import annotations

import fnmatch
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from distributor.api.checks import (
    check_count,
    check_env,
    check_flag,
    check_launch,
    check_logs,
    check_memory,
    check_name,
    check_path,
    check_patterns,
    check_ports,
    check_preload,
    check_seconds,
    is_module_name,
)
from distributor.api.choose import choose_scheduler
from distributor.api.interrupt import MARGIN, plain_interrupts
from distributor.api.target import check_argv, check_call, find_script, places_of, within
from distributor.display import choose
from distributor.display.view import View
from distributor.errors import ConfigurationError, DistributorError, PayloadError, show_shortly
from distributor.machine import versions
from distributor.run.handle import Run
from distributor.shipping import modules, payload, project
from distributor.values.environment import CONTRACT
from distributor.values.job import Function, Job, Module, Resources, Script, Target, WorkingDir
from distributor.values.launch import Launch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distributor.schedulers.base import Scheduler


P = ParamSpec("P")
T = TypeVar("T")


class Distributor:
    """Trains PyTorch models on this machine or on Spark executors.

    A drop-in replacement for ``pyspark.ml.torch.distributor.TorchDistributor``; all additional arguments are
    keyword-only.

    Args:
        num_processes: the world size, which is the number of ranks that train together.
        local_mode: ``True`` trains on this machine, without Spark or Java. ``False`` trains as tasks of the active
            Spark session. ``None`` (default) trains on the session's executors if the active session is on a cluster
            (standalone, YARN, Kubernetes, ``local-cluster``, Spark Connect), otherwise on this machine.
        use_gpu: give each rank its own GPU, device ``LOCAL_RANK`` of those it sees (default). ``False`` hides GPUs.
        launch: how ranks are started: ``"torchrun"`` (default), ``"deepspeed"``, or a launch path with its own
            options, such as ``distributor.launch.DeepSpeed(config)``.
        name: the run's name in the status, in notes, in ``repr(run)`` and in the Spark UI (as the job's description, on
            classic sessions); one line of at most 100 characters.
        env: environment variables for the ranks. They override everything except the rank contract (``RANK``, ...).
        forward_env: patterns (``"WANDB_*"``) of the driver's environment variables that ranks on executors get too.
        working_dir: a project folder that becomes the ranks' current directory and comes first on their import path.
            This machine uses it in place; executors get a copy, which is removed at the end. Scripts and modules are
            looked up in this folder first, then in the current directory.
        working_dir_limit: maximum total size of the files in ``working_dir``, in bytes (default 256 MiB).
        gpus_per_process: number of GPUs for each rank (default 1 with ``use_gpu``). A rank's first GPU is always
            ``cuda:LOCAL_RANK``, and its other GPUs are every ``LOCAL_WORLD_SIZE``-th device after that.
        cpus_per_process: number of CPUs for each rank, and of its OpenMP threads (default: ``spark.task.cpus``, or in
            local mode the rank's share of the machine).
        memory_per_process: memory that each rank can count on, in bytes or as ``"8g"``. An executor gets only as many
            ranks as fit beside its JVM heap (``spark.executor.memoryOverhead``).
        max_processes_per_node: maximum number of ranks on one executor.

            On Spark, these four arguments apply to this run only. If they ask for other CPUs or GPUs than the session's
            own tasks have, they need stage-level scheduling, available on standalone clusters, YARN and Kubernetes.
        start_timeout: number of seconds until all ranks must be up, including the wait for executors (default 600).
        grace_period: number of seconds from SIGTERM to SIGKILL when ranks are stopped, so that they can save
            (default 10).
        heartbeat_timeout: number of seconds of silence after which driver and node give each other up (default 30).
        stall_timeout: number of seconds without any output or CPU use by any rank, after which the run ends with a
            :class:`StallError` (default: never). Ranks that wait in an NCCL collective keep using the CPU, so only
            NCCL's own timeout detects a hang there.
        logs: the ranks whose lines are shown: ``"all"`` (default), ``"rank0"``, ``"none"``, or a list of ranks.
        fold_logs: show identical lines of several ranks once, as ``[ranks 0-15] ...``, up to half a second later.
        log_prefix: start each line with its rank and host, ``[rank 3 host-b]`` (default).
        log_dir: a folder on the driver that receives every rank's whole output, whatever ``logs`` shows, in
            ``<run id>/rank-3.stdout`` and ``rank-3.stderr``.
        progress: show what the run is doing (default): a live status while you wait in a terminal, a status that stays
            below the cell in Jupyter, and elsewhere an occasional line on stderr about a step that takes long.
        driver_ports: first and last port on which the driver may listen for executors, for firewalls that open only
            some ports (default: any free port).
        keep_warm: number of seconds (default 600) for which a process that has imported torch stays on each executor,
            or beside the driver in local mode, and waits for the next run, which then starts in tenths of a second. The
            process runs none of your code and ends with its executor or driver. 0 keeps no such process.
        preload: modules that this process imports as well, such as ``["transformers"]``, so that ranks have them at
            once.
        start_method: ``"fork"`` (default) forks the ranks from a process that has imported torch and none of your code.
            ``"spawn"`` starts each rank as a new process, which imports torch itself.

    Raises:
        ConfigurationError: an argument is wrong; the message names the argument, its value, and what to do.
        ResourceError: there are fewer GPUs than requested. If ``local_mode`` is ``None``, ``run`` raises it instead.

    Example:
        >>> def train(learning_rate, epochs=1):
        ...     import torch.distributed as dist
        ...     dist.init_process_group("gloo")
        ...     return dist.get_world_size()
        >>> Distributor(num_processes=2, local_mode=True, use_gpu=False).run(train, 1e-3)  # doctest: +SKIP
        2
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool | None = None,
        use_gpu: bool = True,
        *,
        launch: Launch | str = "torchrun",
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        forward_env: Sequence[str] = (),
        working_dir: str | os.PathLike[str] | None = None,
        working_dir_limit: int = project.DEFAULT_WORKING_DIR_LIMIT,
        gpus_per_process: int | None = None,
        cpus_per_process: int | None = None,
        memory_per_process: int | str | None = None,
        max_processes_per_node: int | None = None,
        start_timeout: float = 600.0,
        grace_period: float = 10.0,
        heartbeat_timeout: float = 30.0,
        stall_timeout: float | None = None,
        logs: Literal["all", "rank0", "none"] | Sequence[int] = "all",
        fold_logs: bool = False,
        log_prefix: bool = True,
        log_dir: str | os.PathLike[str] | None = None,
        progress: bool = True,
        driver_ports: tuple[int, int] | None = None,
        keep_warm: float = 600.0,
        preload: Sequence[str] = (),
        start_method: Literal["fork", "spawn"] = "fork",
    ) -> None:
        count = check_count("num_processes", num_processes)
        if local_mode is not None and not isinstance(local_mode, bool):
            raise ConfigurationError(f"local_mode has to be True, False or None, not {local_mode!r}")
        self.num_processes = count
        self.local_mode = local_mode
        self.use_gpu = check_flag("use_gpu", use_gpu)
        if gpus_per_process is not None and not use_gpu:
            raise ConfigurationError(f"gpus_per_process={gpus_per_process!r} with use_gpu=False: leave out one of them")
        if isinstance(gpus_per_process, float) and gpus_per_process != int(gpus_per_process):
            raise ConfigurationError(
                f"gpus_per_process has to be a whole number, not {gpus_per_process!r}: ranks cannot share a GPU (NCCL "
                "refuses two ranks on one device)"
            )
        self._resources = Resources(
            count,
            use_gpu,
            None if gpus_per_process is None else check_count("gpus_per_process", gpus_per_process),
            None if cpus_per_process is None else check_count("cpus_per_process", cpus_per_process),
            None if memory_per_process is None else check_memory(memory_per_process),
            None if max_processes_per_node is None else check_count("max_processes_per_node", max_processes_per_node),
        )
        self._launch = check_launch(launch).resolve(count, use_gpu)
        self._name = check_name(name)
        self._env = check_env({} if env is None else env)
        self._forward_env = check_patterns(forward_env)
        self._working_dir = check_path("working_dir", working_dir)
        self._working_dir_limit = check_count("working_dir_limit", working_dir_limit)
        self._start_timeout = check_seconds("start_timeout", start_timeout, 0)
        self._grace_period = check_seconds("grace_period", grace_period, 0)
        self._heartbeat_timeout = check_seconds("heartbeat_timeout", heartbeat_timeout, 1)
        self._stall_timeout = None if stall_timeout is None else check_seconds("stall_timeout", stall_timeout, 1)
        self._log_ranks = check_logs(logs, self.num_processes)
        self._fold_logs = check_flag("fold_logs", fold_logs)
        self._log_prefix = check_flag("log_prefix", log_prefix)
        self._progress = check_flag("progress", progress)
        self._log_dir = check_path("log_dir", log_dir)
        self._driver_ports = check_ports(driver_ports)
        if start_method not in ("fork", "spawn"):
            raise ConfigurationError(f"start_method has to be 'fork' or 'spawn', not {start_method!r}")
        self._start_method = start_method
        self._keep_warm = check_seconds("keep_warm", keep_warm, 0)
        self._preload = check_preload(preload)
        if self._preload and (start_method != "fork" or keep_warm == 0):
            raise ConfigurationError(
                f"preload={list(preload)!r} needs a warm process, which there is none of with "
                f"start_method={start_method!r} and keep_warm={keep_warm!r}: leave it out"
            )
        if use_gpu and local_mode is not None:
            self._check_gpus()

    def __repr__(self) -> str:
        request = f"num_processes={self.num_processes}, local_mode={self.local_mode}, use_gpu={self.use_gpu}"
        return f"{type(self).__name__}({request})"

    @overload
    def run(self, train_object: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...

    @overload
    def run(self, train_object: str | os.PathLike[str], *args: str | float | os.PathLike[str]) -> None: ...

    def run(self, train_object: Any, *args: Any, **kwargs: Any) -> Any:
        """Train and return rank 0's return value.

        Equivalent to ``submit(...).result()``, except that only rank 0's return value is sent to the driver.

        Args:
            train_object: a callable, or the path of a ``.py`` file on the driver.
            args: arguments of the callable; for a file, strings, numbers or paths, which it receives as text.
            kwargs: keyword arguments of the callable; a file takes none.

        Raises:
            ConfigurationError: the input is wrong; nothing was started.
            TrainingError: a rank failed.
            StartError, NodeLostError, ResultError, RunCancelledError: see each class.
            KeyboardInterrupt: Ctrl-C was pressed; raised once the ranks have ended.

        Example:
            >>> Distributor(4, use_gpu=False).run("train.py", "--lr", "0.1")  # doctest: +SKIP
        """
        return self._wait(self._submit(train_object, args, kwargs, "rank0"))

    def submit(self, train_object: Any, *args: Any, **kwargs: Any) -> Run:
        """Start training and return the run's handle at once. Arguments and input errors are those of :meth:`run`.

        Example:
            >>> run = Distributor(4, use_gpu=False).submit(train, 1e-3)  # doctest: +SKIP
            >>> run.results()  # doctest: +SKIP
        """
        return self._submit(train_object, args, kwargs, "all")

    def run_module(self, module: str, /, *args: str) -> None:
        """Train with a module, run as ``python -m module args...``. Raises the errors of :meth:`run`."""
        self._wait(self.submit_module(module, *args))

    def submit_module(self, module: str, /, *args: str) -> Run:
        """Start training with a module and return the run's handle at once."""
        if not is_module_name(module):
            raise ConfigurationError(f"module has to be a dotted name such as 'pkg.train', not {module!r}")
        return self._submit(Module(module, check_argv(args)), (), {}, "rank0")

    def _wait(self, run: Run) -> Any:
        with plain_interrupts():
            try:
                return run.result()
            except DistributorError as error:
                error.__traceback__ = None  # hides the frames of this package
                raise
            except BaseException as error:
                # Ctrl-C, or another exception from a signal handler: stop the ranks, since nothing would wait for them.
                try:
                    run.cancel("interrupted; again to end all ranks at once", say_where=True)
                    run.wait(self._grace_period + MARGIN)
                except BaseException:
                    run.kill()
                    run.wait(MARGIN)
                if isinstance(error, KeyboardInterrupt):
                    show_shortly(error)
                    error.__traceback__ = None
                raise

    def _submit(
        self, train_object: Any, args: Sequence[Any], kwargs: Mapping[str, Any], collect: Literal["rank0", "all"]
    ) -> Run:
        session = self._session()
        view = choose.choose() if self._progress else None
        scheduler = choose_scheduler(session, self.use_gpu)
        job = self._job(train_object, args, kwargs, collect, scheduler, local=session is None, view=view)
        scheduler.check(job)
        log_folder = self._make_log_folder(job.run_id)
        return Run(
            job,
            scheduler,
            log_folder=log_folder,
            fold_logs=self._fold_logs,
            log_prefix=self._log_prefix,
            announce=view is not None and view.announces and session is not None,
            view=view,
        ).start(() if view is None else self._notes(session, log_folder))

    def _notes(self, session: SparkSession | None, log_folder: Path | None) -> list[str]:
        """Return notes on what may surprise the user when the run starts."""
        notes = []
        if session is None and self.local_mode is None and sys.modules.get("pyspark") is not None:
            from distributor.schedulers.spark import session as spark_session

            if spark_session.active_session() is None:
                notes.append("trains on this machine: no Spark session is active")
        if log_folder is not None:
            notes.append(f"all output goes to {min(str(log_folder), os.path.relpath(log_folder), key=len)}")
        return notes

    def plan(self, train_object: Any, *args: Any, **kwargs: Any) -> Job:
        """Return the job that :meth:`submit` would start: checked and packed, but not started.

        If training on Spark is requested and there is no session yet, the fields that depend on a session stay open.

        Args:
            train_object: as in :meth:`run`, or a :class:`distributor.values.job.Module`.
            args, kwargs: as in :meth:`run`.

        Raises:
            ConfigurationError: as in :meth:`run`.

        Example:
            >>> Distributor(2, True, use_gpu=False).plan("train.py", "--lr", 0.1).target.argv  # doctest: +SKIP
            ('--lr', '0.1')
        """
        session = self._session(needed=False)
        local = session is None and self.local_mode is not False
        scheduler = choose_scheduler(session, self.use_gpu) if local or session is not None else None
        job = self._job(train_object, args, kwargs, "all", scheduler, local=local, view=None)
        if scheduler is not None:
            scheduler.check(job)
        return job

    def _job(
        self,
        train_object: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        collect: Literal["rank0", "all"],
        scheduler: Scheduler | None,
        *,
        local: bool,
        view: View | None,
    ) -> Job:
        if local:
            self._check_packages()
        target = self._target(train_object, args, kwargs, local)
        working_dir = self._pack_working_dir(local, view)
        if isinstance(target, Script) and working_dir is not None:
            target = within(target, Path(working_dir.path))
        ranks_per_task, task_profile = (1, None) if scheduler is None else scheduler.shape(self._resources)
        return Job(
            run_id=secrets.token_hex(6),
            name=self._name,
            num_processes=self.num_processes,
            target=target,
            use_gpu=self.use_gpu,
            launch=self._launch,
            ranks_per_task=ranks_per_task,
            task_profile=task_profile,
            gpus_per_process=self._resources.gpus_per_process or 1,
            cpus_per_process=self._resources.cpus_per_process,
            max_processes_per_node=None if scheduler is None else scheduler.node_limit(self._resources),
            spark_cpus=None if scheduler is None else scheduler.omp_threads,
            versions=versions.here(),
            env={**self._launch.env(self.use_gpu), **self._forwarded(), **self._env},
            working_dir=working_dir,
            grace_period=self._grace_period,
            start_timeout=self._start_timeout,
            heartbeat_timeout=self._heartbeat_timeout,
            stall_timeout=self._stall_timeout,
            log_ranks=self._log_ranks,
            keep_logs=self._log_dir is not None,
            driver_ports=self._driver_ports,
            start_method=self._start_method,
            keep_warm=self._keep_warm,
            preload=(*self._launch.preload, *self._preload),
            collect=collect,
        )

    def _check_packages(self) -> None:
        """Check that this machine has the packages that ranks import."""
        for module, who in self._launch.needs.items():
            if modules.find(module) is None:
                raise ConfigurationError(
                    f"{who} needs {module}, which {sys.executable} has not: pip install 'distributor[{module}]'"
                )

    def _check_gpus(self) -> None:
        """Check for missing GPUs early, if ranks train on this machine or a session is already active."""
        if self.local_mode:
            choose_scheduler(None, use_gpu=True).shape(self._resources)
        elif sys.modules.get("pyspark") is not None:
            from distributor.schedulers.spark import session as spark_session

            session = spark_session.active_session()
            if session is not None:
                choose_scheduler(session, use_gpu=True).shape(self._resources)

    def _session(self, *, needed: bool = True) -> SparkSession | None:
        """Return the session to train on; ``None`` for this machine, or if no session exists and none is needed."""
        if self.local_mode is True:
            return None
        if self.local_mode is None and "pyspark" not in sys.modules:
            return None  # without pyspark there is no active session
        try:
            from distributor.schedulers.spark import session as spark_session

            session = spark_session.active_session()
        except ImportError as error:
            if self.local_mode is None:
                return None
            raise ConfigurationError(
                f"local_mode=False trains on Spark, but pyspark cannot be imported ({error}): "
                "pip install 'distributor[spark]'"
            ) from error
        if self.local_mode is None:
            return session if session is not None and spark_session.is_cluster(session) else None
        if session is None and needed:
            raise ConfigurationError(
                "local_mode=False trains on Spark, but there is no active Spark session: create one first "
                "(SparkSession.builder.getOrCreate()), or pass local_mode=True to train on this machine"
            )
        return session

    def _target(self, train_object: Any, args: Sequence[Any], kwargs: Mapping[str, Any], local: bool) -> Target:
        if isinstance(train_object, Module):
            if local:
                self._check_module(train_object.name)
            return train_object
        if isinstance(train_object, (str, os.PathLike)):
            if kwargs:
                raise ConfigurationError(
                    f"a script takes no keyword arguments ({', '.join(kwargs)}): pass them as '--name', 'value'"
                )
            path = find_script(train_object, self._working_dir)
            try:
                source = path.read_bytes()
            except OSError as error:
                raise PayloadError(f"the script {str(path)!r} cannot be read: {error.strerror}") from error
            return Script(str(path.absolute()), source, check_argv(args))
        if callable(train_object):
            check_call(train_object, args, kwargs)
            pickled = payload.dump_function(train_object, args, kwargs, by_value=not local)
            return Function(payload.name_of(train_object), pickled)
        raise ConfigurationError(
            "what to train has to be a callable or the path of a .py file, "
            f"not {type(train_object).__name__} {train_object!r}"
        )

    def _check_module(self, name: str) -> None:
        places = places_of(self._working_dir)
        folders = [str(folder) for folder in places.values()]
        found = modules.find(name, folders)
        if found is None:
            path = ", ".join(modules.search_path())
            raise PayloadError(f"there is no module {name!r} in {', '.join(places)} or Python's path: {path}")
        if found.submodule_search_locations is not None and modules.find(f"{name}.__main__", folders) is None:
            raise PayloadError(
                f"{name!r} is a package without a module __main__, so that it cannot be run: name one of its modules"
            )

    def _pack_working_dir(self, local: bool, view: View | None) -> WorkingDir | None:
        if self._working_dir is None:
            return None
        folder = self._working_dir.absolute()
        if not folder.is_dir():
            raise PayloadError(f"working_dir {str(self._working_dir)!r} is not a folder on the driver")
        if local:
            return WorkingDir(str(folder), None)
        with nullcontext() if view is None else view.packing(str(self._working_dir)) as packed:
            return WorkingDir(str(folder), project.pack_folder(folder, self._working_dir_limit, packed))

    def _make_log_folder(self, run_id: str) -> Path | None:
        if self._log_dir is None:
            return None
        folder = self._log_dir.absolute() / run_id
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"log_dir {str(self._log_dir)!r} cannot be used, {folder} cannot be made: {error.strerror}"
            ) from error
        return folder

    def _forwarded(self) -> dict[str, str]:
        return {
            name: value
            for name, value in os.environ.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._forward_env) and name not in CONTRACT
        }


class TorchDistributor(Distributor):
    """:class:`Distributor` under PySpark's name."""

    __doc__ = f"{Distributor.__doc__}"  # for help(): the arguments are the same
