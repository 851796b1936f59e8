"""What users call. Checks the request, builds a Job, chooses a scheduler."""

from __future__ import annotations

import copy
import fnmatch
import inspect
import json
import operator
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from distributor import deepspeed_config, limits, modules, notices, payload, shipping, versions, views
from distributor.environment import CONTRACT
from distributor.errors import ConfigurationError, DistributorError, PayloadError, show_shortly
from distributor.job import DeepspeedOptions, Function, Job, Module, Resources, Script, Target, WorkingDir
from distributor.run import Run
from distributor.views import View

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distributor.schedulers.local import LocalScheduler
    from distributor.schedulers.spark import SparkScheduler

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds beyond the grace that Ctrl-C waits for the ranks to end before it gives the prompt back.
_INTERRUPT_MARGIN = 10.0

#: Characters of a run's name.
_LONGEST_NAME = 100

#: Bytes below which memory was not meant to be counted in bytes.
_LEAST_MEMORY = 1_000_000

#: A year, in seconds: longer is a mistake, and more than clocks can add up.
_LONGEST = 366 * 24 * 3600.0


class TorchDistributor:
    """Trains with PyTorch on this machine or on Spark executors.

    A drop-in for ``pyspark.ml.torch.distributor.TorchDistributor``; what is added is keyword-only.

    Args:
        num_processes: world size: how many ranks train together.
        local_mode: ``True`` trains on this machine, without Spark or Java. ``False`` trains as tasks of the active
            Spark session. ``None`` (default) decides: a session on a cluster (standalone, YARN, Kubernetes,
            ``local-cluster``, Spark Connect) trains on its executors, anything else on this machine.
        use_gpu: each rank gets a GPU of its own, device ``LOCAL_RANK`` of those it sees. ``False`` hides GPUs.
        name: what the run is called in the status, in notes, in ``repr(run)`` and in the Spark UI (its job's
            description, on classic sessions); one line of at most 100 characters.
        env: environment variables for the ranks; they win over everything but the rank contract (``RANK``, ...).
        forward_env: patterns (``"WANDB_*"``) of the driver's environment variables that ranks on executors get as well.
        working_dir: a project folder that becomes the ranks' current directory and comes first on their import path.
            On this machine it is used in place, executors get a copy that is removed in the end. Scripts and modules
            are looked for in it, then in the current directory.
        working_dir_limit: bytes that the files in ``working_dir`` may have together (default 256 MiB).
        gpus_per_process: GPUs of each rank (default 1 with ``use_gpu``). ``cuda:LOCAL_RANK`` is always a rank's first
            one, and every ``LOCAL_WORLD_SIZE``-th device from there is its own.
        cpus_per_process: CPUs of each rank, and its number of OpenMP threads (default: ``spark.task.cpus``, or in local
            mode its share of the machine).
        memory_per_process: memory that each rank may count on, in bytes or as ``"8g"``: an executor gets only as many
            ranks as have room beside its JVM heap (``spark.executor.memoryOverhead``).
        max_processes_per_node: ranks of one executor at most.

            On Spark, these four hold for this run alone. Where a session's own tasks have other CPUs or GPUs, that
            takes stage-level scheduling, which there is on standalone clusters, YARN and Kubernetes.
        start_timeout: seconds that may pass until all ranks are up, waiting for executors included (default 600).
        grace_period: seconds from SIGTERM to SIGKILL when ranks are stopped, so that they may save (default 10).
        heartbeat_timeout: seconds of silence after which driver and node give each other up (default 30).
        stall_timeout: ends the run with a :class:`StallError` when for so many seconds no rank has written anything or
            used CPU time (default: never). NCCL waits busily: where ranks stand in its collectives, its own timeout
            has to find out.
        logs: whose lines are shown: ``"all"`` (default), ``"rank0"``, ``"none"``, or a list of ranks.
        fold_logs: shows identical lines of several ranks once, ``[ranks 0-15] ...``, up to half a second later.
        log_prefix: begins each line with its rank and host, ``[rank 3 host-b]`` (default).
        log_dir: a folder on the driver that gets every rank's whole output, whatever is shown, in
            ``<run id>/rank-3.stdout`` and ``rank-3.stderr``.
        progress: shows what the run is doing (default): in a terminal a live status while you wait for it, in Jupyter
            one that stays below the cell, elsewhere a line on stderr now and then about what takes long.
        driver_ports: first and last port on which the driver may listen for executors, where a firewall opens only
            some (default: any free port).
        keep_warm: seconds (default 600) for which a process that has imported torch stays on each executor, or beside
            the driver in local mode, and waits for the next run, which then starts in tenths of a second. It runs none
            of your code and ends with its executor or driver. 0 keeps none.
        preload: modules that this process imports as well, such as ``["transformers"]``; ranks have them at once.
        start_method: ``"fork"`` (default): ranks are forks of a process that has imported torch and nothing of yours.
            ``"spawn"``: each is a process of its own, and imports torch itself.

    Raises:
        ConfigurationError: an argument is wrong; the text says which, its value, and what to do.
        ResourceError: GPUs are wanted that are not there (with ``local_mode`` given; else ``run`` says so).

    Example:
        >>> def train(learning_rate, epochs=1):
        ...     import torch.distributed as dist
        ...     dist.init_process_group("gloo")
        ...     return dist.get_world_size()
        >>> TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(train, 1e-3)  # doctest: +SKIP
        2
    """

    _launch_path = "torchrun"
    _path_preload: tuple[str, ...] = ()

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool | None = None,
        use_gpu: bool = True,
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        forward_env: Sequence[str] = (),
        working_dir: str | os.PathLike[str] | None = None,
        working_dir_limit: int = shipping.DEFAULT_WORKING_DIR_LIMIT,
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
        count = _check_count("num_processes", num_processes)
        if local_mode is not None and not isinstance(local_mode, bool):
            raise ConfigurationError(f"local_mode has to be True, False or None, not {local_mode!r}")
        self.num_processes = count
        self.local_mode = local_mode
        self.use_gpu = _check_flag("use_gpu", use_gpu)
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
            None if gpus_per_process is None else _check_count("gpus_per_process", gpus_per_process),
            None if cpus_per_process is None else _check_count("cpus_per_process", cpus_per_process),
            None if memory_per_process is None else _check_memory(memory_per_process),
            None if max_processes_per_node is None else _check_count("max_processes_per_node", max_processes_per_node),
        )
        self._name = _check_name(name)
        self._env = _check_env({} if env is None else env)
        self._forward_env = _check_patterns(forward_env)
        self._working_dir = _check_path("working_dir", working_dir)
        self._working_dir_limit = _check_count("working_dir_limit", working_dir_limit)
        self._start_timeout = _check_seconds("start_timeout", start_timeout, 0)
        self._grace_period = _check_seconds("grace_period", grace_period, 0)
        self._heartbeat_timeout = _check_seconds("heartbeat_timeout", heartbeat_timeout, 1)
        self._stall_timeout = None if stall_timeout is None else _check_seconds("stall_timeout", stall_timeout, 1)
        self._log_ranks = _check_logs(logs, self.num_processes)
        self._fold_logs = _check_flag("fold_logs", fold_logs)
        self._log_prefix = _check_flag("log_prefix", log_prefix)
        self._progress = _check_flag("progress", progress)
        self._log_dir = _check_path("log_dir", log_dir)
        self._driver_ports = _check_ports(driver_ports)
        if start_method not in ("fork", "spawn"):
            raise ConfigurationError(f"start_method has to be 'fork' or 'spawn', not {start_method!r}")
        self._start_method = start_method
        self._keep_warm = _check_seconds("keep_warm", keep_warm, 0)
        self._preload = _check_preload(preload)
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
        """Trains and returns rank 0's value; ``submit(...).result()``, but only rank 0's value travels.

        Args:
            train_object: a callable, or the path of a ``.py`` file on the driver.
            args: its arguments; for a file strings, numbers or paths, of which it gets the text.
            kwargs: keyword arguments of a callable.

        Raises:
            ConfigurationError: bad input; nothing was started.
            TrainingError: a rank failed.
            StartError, NodeLostError, ResultError, RunCancelledError: as they say.
            KeyboardInterrupt: after Ctrl-C, once the ranks have ended.

        Example:
            >>> TorchDistributor(4, use_gpu=False).run("train.py", "--lr", "0.1")  # doctest: +SKIP
        """
        return self._wait(self._submit(train_object, args, kwargs, "rank0"))

    def submit(self, train_object: Any, *args: Any, **kwargs: Any) -> Run:
        """Starts training and returns its handle at once. Arguments and bad input as with :meth:`run`.

        Example:
            >>> run = TorchDistributor(4, use_gpu=False).submit(train, 1e-3)  # doctest: +SKIP
            >>> run.results()  # doctest: +SKIP
        """
        return self._submit(train_object, args, kwargs, "all")

    def run_module(self, module: str, /, *args: str) -> None:
        """Trains a module as ``python -m module args...`` would run it. Raises what :meth:`run` raises."""
        self._wait(self.submit_module(module, *args))

    def submit_module(self, module: str, /, *args: str) -> Run:
        """Starts a module and returns the run's handle at once."""
        if not _is_module_name(module):
            raise ConfigurationError(f"module has to be a dotted name such as 'pkg.train', not {module!r}")
        return self._submit(Module(module, _check_argv(args)), (), {}, "rank0")

    def _wait(self, run: Run) -> Any:
        with _plain_interrupts():
            try:
                return run.result()
            except DistributorError as error:
                error.__traceback__ = None  # without the way through this package
                raise
            except BaseException as error:  # Ctrl-C, or what else a signal handler raises: nobody would wait for ranks
                try:
                    run.cancel("interrupted; again to end all ranks at once", say_where=True)
                    run.wait(self._grace_period + _INTERRUPT_MARGIN)
                except BaseException:
                    run.kill()
                    run.wait(_INTERRUPT_MARGIN)
                if isinstance(error, KeyboardInterrupt):
                    show_shortly(error)
                    error.__traceback__ = None
                raise

    def _submit(
        self, train_object: Any, args: Sequence[Any], kwargs: Mapping[str, Any], collect: Literal["rank0", "all"]
    ) -> Run:
        session = self._session()
        view = views.choose() if self._progress else None
        scheduler = _scheduler(session, self.use_gpu)
        job = self._job(train_object, args, kwargs, collect, scheduler, local=session is None, view=view)
        scheduler.check(job)
        log_folder = self._make_log_folder(job.run_id)
        return Run(
            job,
            scheduler,
            log_folder=log_folder,
            notes=() if view is None else self._notes(session, log_folder),
            fold_logs=self._fold_logs,
            log_prefix=self._log_prefix,
            announce=view is not None and view.announces and session is not None,
            view=view,
        )

    def _notes(self, session: SparkSession | None, log_folder: Path | None) -> list[str]:
        """What a user may not expect of a run that starts."""
        notes = []
        if session is None and self.local_mode is None and sys.modules.get("pyspark") is not None:
            from distributor.schedulers import spark_session

            if spark_session.active_session() is None:
                notes.append("trains on this machine: no Spark session is active")
        if log_folder is not None:
            notes.append(f"all output goes to {min(str(log_folder), os.path.relpath(log_folder), key=len)}")
        return notes

    def plan(self, train_object: Any, *args: Any, **kwargs: Any) -> Job:
        """What :meth:`submit` would start, as data: checked, packed, and not started.

        Where training on Spark is asked for and there is no session yet, what a session decides is left open.

        Args:
            train_object: as with :meth:`run`, or a :class:`distributor.job.Module`.
            args, kwargs: as with :meth:`run`.

        Raises:
            ConfigurationError: as :meth:`run`.

        Example:
            >>> TorchDistributor(2, True, use_gpu=False).plan("train.py", "--lr", 0.1).target.argv  # doctest: +SKIP
            ('--lr', '0.1')
        """
        session = self._session(needed=False)
        local = session is None and self.local_mode is not False
        scheduler = _scheduler(session, self.use_gpu) if local or session is not None else None
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
        scheduler: SparkScheduler | LocalScheduler | None,
        *,
        local: bool,
        view: View | None,
    ) -> Job:
        if local:
            self._check_packages()
        target = self._target(train_object, args, kwargs, local)
        working_dir = self._pack_working_dir(local, view)
        if isinstance(target, Script) and working_dir is not None:
            target = _within(target, Path(working_dir.path))
        ranks_per_task, task_profile = (1, None) if scheduler is None else scheduler.shape(self._resources)
        return Job(
            run_id=secrets.token_hex(6),
            name=self._name,
            num_processes=self.num_processes,
            target=target,
            use_gpu=self.use_gpu,
            ranks_per_task=ranks_per_task,
            task_profile=task_profile,
            gpus_per_process=self._resources.gpus_per_process or 1,
            cpus_per_process=self._resources.cpus_per_process,
            max_processes_per_node=None if scheduler is None else scheduler.node_limit(self._resources),
            spark_cpus=None if scheduler is None else scheduler.omp_threads,
            versions=versions.here(),
            env={**self._path_env(), **self._forwarded(), **self._env},
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
            preload=(*self._path_preload, *self._preload),
            launch_path=self._launch_path,
            deepspeed=self._deepspeed(),
            collect=collect,
        )

    def _path_env(self) -> dict[str, str]:
        """What the launch path needs set before torch is imported."""
        return {}

    def _check_packages(self) -> None:
        """Looks whether this machine has what ranks import."""

    def _deepspeed(self) -> DeepspeedOptions | None:
        return None

    def _check_gpus(self) -> None:
        """Looks for missing GPUs as early as it can: when the place to train is known and there."""
        if self.local_mode:
            _scheduler(None, use_gpu=True).shape(self._resources)
        elif sys.modules.get("pyspark") is not None:
            from distributor.schedulers import spark_session

            session = spark_session.active_session()
            if session is not None:
                _scheduler(session, use_gpu=True).shape(self._resources)

    def _session(self, *, needed: bool = True) -> SparkSession | None:
        """The session to train on, ``None`` for this machine, or where there is none and none is needed."""
        if self.local_mode is True:
            return None
        if self.local_mode is None and "pyspark" not in sys.modules:
            return None  # nobody can have an active session
        try:
            from distributor.schedulers import spark_session

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
            return Script(str(path.absolute()), source, _check_argv(args))
        if callable(train_object):
            _check_call(train_object, args, kwargs)
            pickled = payload.dump_function(train_object, args, kwargs, by_value=not local)
            return Function(payload.name_of(train_object), pickled)
        raise ConfigurationError(
            "what to train has to be a callable or the path of a .py file, "
            f"not {type(train_object).__name__} {train_object!r}"
        )

    def _check_module(self, name: str) -> None:
        places = _places(self._working_dir)
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
            return WorkingDir(str(folder), shipping.pack_folder(folder, self._working_dir_limit, packed))

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


class DeepspeedTorchDistributor(TorchDistributor):
    """Trains with DeepSpeed on this machine or on Spark executors.

    A drop-in for PySpark's ``pyspark.ml.deepspeed.deepspeed_distributor``; what is added is keyword-only.

    Args:
        numGpus: ranks, each with a GPU of its own, of each node.
        nnodes: nodes; ``numGpus * nnodes`` ranks train together. Spark places them: ``max_processes_per_node=numGpus``
            keeps it from putting more on one executor.
        localMode: as ``local_mode`` of :class:`TorchDistributor`.
        useGpu: as ``use_gpu``. Without GPUs, DeepSpeed trains on CPUs, with gloo.
        deepspeedConfig: DeepSpeed's configuration, as a dict or the path of a JSON or YAML file on the driver;
            :func:`distributor.zero` makes one. ``"auto"`` values are filled. A function gets the final one from
            ``distributor.runtime.deepspeed_config()``; no file is left anywhere.
        auto: values for what is ``"auto"``: ``micro_batch_size``, ``gradient_accumulation_steps``, ``learning_rate``,
            ``betas``, ``eps``, ``weight_decay``, ``gradient_clipping``, ``warmup_steps``, ``total_steps``,
            ``precision`` (``"fp32"``, ``"fp16"``, ``"bf16"``) and ``hidden_size`` (of the model, for the buckets).
            Batch sizes follow from each other; what is left is filled with the defaults of Hugging Face's
            ``TrainingArguments``. Accelerate and Transformers get it unfilled, since they know more.
        script_arguments: scripts and modules get ``--deepspeed --deepspeed_config PATH`` after their own arguments
            (default), as with DeepSpeed's own launcher. ``False`` for those that do not know these options.
        extensions_timeout: seconds that ranks wait for the one of their node that compiles DeepSpeed's extensions on
            first use (default 600). They stay in ``~/.cache/distributor``, or in ``TORCH_EXTENSIONS_DIR``.
        options: everything else is as with :class:`TorchDistributor`.

    Raises:
        ConfigurationError: an argument or the configuration is wrong; the text says which, its value, and what to do.
        ResourceError: GPUs are wanted that are not there (with ``localMode`` given; else ``run`` says so).

    Example:
        >>> def train():
        ...     import deepspeed
        ...     from distributor import runtime
        ...     engine, *_ = deepspeed.initialize(model=make_model(), config=runtime.deepspeed_config())
        >>> DeepspeedTorchDistributor(numGpus=4, nnodes=2, deepspeedConfig=zero(3)).run(train)  # doctest: +SKIP
    """

    _launch_path = "deepspeed"
    _path_preload = ("deepspeed",)

    def __init__(
        self,
        numGpus: int = 1,  # noqa: N803  # PySpark's name, as are the next ones
        nnodes: int = 1,
        localMode: bool | None = None,  # noqa: N803
        useGpu: bool = True,  # noqa: N803
        deepspeedConfig: str | os.PathLike[str] | Mapping[str, Any] | None = None,  # noqa: N803
        *,
        auto: Mapping[str, Any] | None = None,
        script_arguments: bool = True,
        extensions_timeout: float = 600.0,
        **options: Any,
    ) -> None:
        for old, new in (("num_processes", "numGpus"), ("local_mode", "localMode"), ("use_gpu", "useGpu")):
            if old in options:
                raise ConfigurationError(f"{old} is called {new} here, as in PySpark's DeepspeedTorchDistributor")
        # PySpark takes True for one GPU, and its own tests pass that.
        world_size = _check_count("numGpus", 1 if numGpus is True else numGpus) * _check_count("nnodes", nnodes)
        super().__init__(world_size, localMode, useGpu, **options)
        self._extensions_timeout = _check_seconds("extensions_timeout", extensions_timeout, 1)
        self._script_arguments = bool(script_arguments)
        if auto is not None and deepspeedConfig is None:
            raise ConfigurationError(f"auto={dict(auto)!r} fills a deepspeedConfig, but there is none")
        self._shape = (numGpus, nnodes)
        self._auto = dict(auto or {})
        self._set_config(deepspeedConfig)

    def __repr__(self) -> str:
        per_node, nodes = self._shape
        request = f"numGpus={per_node}, nnodes={nodes}, localMode={self.local_mode}, useGpu={self.use_gpu}"
        return f"{type(self).__name__}({request})"

    def with_config(
        self,
        deepspeedConfig: str | os.PathLike[str] | Mapping[str, Any] | None,  # noqa: N803
    ) -> DeepspeedTorchDistributor:
        """The same distributor, ``auto`` included, with another configuration. Raises what the constructor raises."""
        other = copy.copy(self)
        other._set_config(deepspeedConfig)
        return other

    def _set_config(self, source: str | os.PathLike[str] | Mapping[str, Any] | None) -> None:
        self.deepspeed_config = source
        self._configs = None if source is None else _deepspeed_configs(source, self.num_processes, self._auto)

    def _deepspeed(self) -> DeepspeedOptions:
        if self._configs is None:
            return DeepspeedOptions(
                extensions_timeout=self._extensions_timeout, script_arguments=self._script_arguments
            )
        final, given = self._configs
        return DeepspeedOptions(
            json.dumps(final),
            json.dumps(given),
            deepspeed_config.zero_stage(final),
            deepspeed_config.precision(final),
            deepspeed_config.extensions(final, self.use_gpu),
            self._extensions_timeout,
            self._script_arguments,
        )

    def _check_packages(self) -> None:
        if self._configs is not None and modules.find("deepspeed") is None:
            raise ConfigurationError(
                f"deepspeedConfig needs deepspeed, which {sys.executable} has not: pip install 'distributor[deepspeed]'"
            )

    def _path_env(self) -> dict[str, str]:
        # Asked for GPUs as it is imported, torch would use CUDA, after which no process can be forked; NVML tells too.
        env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        return env if self.use_gpu else {**env, "DS_ACCELERATOR": "cpu"}


def _deepspeed_configs(
    source: str | os.PathLike[str] | Mapping[str, Any], world_size: int, auto: Mapping[str, Any]
) -> tuple[deepspeed_config.Config, deepspeed_config.Config]:
    """The final configuration, and the one with every "auto" that another library may fill."""
    config = deepspeed_config.read(source)
    deepspeed_config.check(config, world_size)
    if deepspeed_config.TRAIN not in config and deepspeed_config.MICRO not in config:
        notices.logger.warning(
            "deepspeedConfig gives no batch size: deepspeed.initialize refuses it unless %s or %s is added",
            deepspeed_config.TRAIN,
            deepspeed_config.MICRO,
        )
    final = deepspeed_config.fill(config, world_size, auto)
    deepspeed_config.check(final, world_size)
    return final, deepspeed_config.fill(config, world_size, auto, guess=False)


def find_script(script: str | os.PathLike[str], working_dir: Path | None) -> Path:
    """Where a script is: in ``working_dir``, or else in the current directory.

    Raises:
        PayloadError: it is in neither, or is no Python file.
    """
    path = Path(script)
    if path.suffix != ".py":
        raise PayloadError(
            f"{str(path)!r} is not a .py file: pass the path of a Python script, a callable, "
            "or use run_module('pkg.train') for a module"
        )
    places = {"": Path()} if path.is_absolute() else _places(working_dir)
    found = next((folder / path for folder in places.values() if os.path.exists(folder / path)), None)
    if found is None:
        where = "" if path.is_absolute() else f" in {' or '.join(places)}"
        raise PayloadError(f"there is no script {str(path)!r}{where}")
    return found


def _places(working_dir: Path | None) -> dict[str, Path]:
    """Where scripts and modules are looked for, in order, each with its name for people."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise ConfigurationError("the driver's current directory does not exist any more: change to one") from None
    first = {} if working_dir is None else {f"working_dir {working_dir}": working_dir.absolute()}
    return {**first, f"the current directory {here}": here}


def _scheduler(session: SparkSession | None, use_gpu: bool) -> SparkScheduler | LocalScheduler:
    """That of a session; without one this machine, with the GPUs that Spark found for the driver where it did."""
    if session is not None:
        from distributor.schedulers.spark import SparkScheduler

        return SparkScheduler(session)
    from distributor.schedulers.local import LocalScheduler

    gpus = None
    if use_gpu and sys.modules.get("pyspark") is not None:
        from distributor.schedulers import spark_session

        gpus = spark_session.driver_gpus()
    return LocalScheduler(gpus=gpus)


def _check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ConfigurationError(f"{name} has to be a positive integer, not {value!r}")
    return operator.index(value)


def _check_name(name: Any) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigurationError(f"name must be one line of text, not {name!r}")
    if len(name) > _LONGEST_NAME:
        raise ConfigurationError(f"name must have at most {_LONGEST_NAME} characters, not {len(name):,}: shorten it")
    return name.strip()


def _check_seconds(name: str, seconds: Any, least: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not least <= seconds <= _LONGEST:
        raise ConfigurationError(f"{name} has to be a number of seconds from {least} to a year, not {seconds!r}")
    return float(seconds)


def _check_memory(size: Any) -> int:
    try:
        number = limits.parse_memory(size) if isinstance(size, str) else _check_count("memory_per_process", size)
    except ValueError:
        number = 0
    if number < _LEAST_MEMORY:
        raise ConfigurationError(
            f"memory_per_process has to be a size as '8g' or a number of bytes, a million at least, not {size!r}"
        )
    return number


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} has to be True or False, not {value!r}")
    return value


def _check_path(name: str, value: Any) -> Path | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"{name} has to be the path of a folder, not {value!r}")
    return None if value is None else Path(value)


def _check_patterns(patterns: Any) -> tuple[str, ...]:
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise ConfigurationError(f"forward_env has to be a list of patterns such as ['WANDB_*'], not {patterns!r}")
    listed = tuple(patterns)
    for pattern in listed:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"forward_env has to list patterns such as 'WANDB_*', not {pattern!r}")
    return listed


def _check_env(env: Any) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise ConfigurationError(f"env has to be a dict such as {{'SEED': '1'}}, not a {type(env).__name__}")
    for name, value in env.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"env has to map strings to strings; the name {name!r} is none")
        kind = type(value).__name__
        if not isinstance(value, str):  # not told, since it may be a secret
            raise ConfigurationError(f"env has to map strings to strings; the value of {name!r} is of type {kind}")
        if not name or "=" in name or "\0" in name + value:
            raise ConfigurationError(
                f"env names a variable that cannot be: {name!r} is empty or holds '=' or a NUL byte"
            )
        if name in CONTRACT:
            raise ConfigurationError(f"env sets {name}, which the run decides for each rank: leave it out")
    return dict(env)


def _check_logs(logs: Any, num_processes: int) -> tuple[int, ...] | None:
    """The ranks whose lines are shown, ``None`` for all."""
    named: dict[str, tuple[int, ...] | None] = {"all": None, "rank0": (0,), "none": ()}
    if isinstance(logs, str) and logs in named:
        return named[logs]
    if isinstance(logs, str) or not isinstance(logs, Iterable):
        raise ConfigurationError(f"logs has to be 'all', 'rank0', 'none' or a list of ranks, not {logs!r}")
    ranks = tuple(logs)
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise ConfigurationError(f"logs has to list ranks as numbers, not {rank!r}")
        if not 0 <= rank < num_processes:
            raise ConfigurationError(
                f"logs names rank {rank!r}; with num_processes={num_processes} there are 0 to {num_processes - 1}"
            )
    return ranks


def _check_ports(ports: Any) -> tuple[int, int] | None:
    if ports is None:
        return None
    try:
        first, last = (operator.index(port) for port in ports)
    except (TypeError, ValueError):
        first, last = 0, -1
    if not 1 <= first <= last <= 65535:
        raise ConfigurationError(f"driver_ports has to be the first and the last of some ports, not {ports!r}")
    return first, last


@contextmanager
def _plain_interrupts() -> Iterator[None]:
    """While inside, Ctrl-C is a KeyboardInterrupt and nothing else.

    PySpark's handler cancels all jobs of the session before it raises one (``SparkContext._do_init``): the ranks would
    be gone before anybody could give them their grace period.
    """
    handler = signal.getsignal(signal.SIGINT)
    sparks = (getattr(handler, "__module__", None) or "").startswith("pyspark.")
    if not sparks or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Finds what every rank would fail with before it has begun."""
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{payload.name_of(function)} is a coroutine function, whose call does nothing yet: pass a function that "
            "runs it, with asyncio.run"
        )
    try:
        # What a decorator wraps may well be called with other arguments than itself.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        told = signature.replace(parameters=plain, return_annotation=signature.empty)
        raise ConfigurationError(f"{payload.name_of(function)}{told} cannot be called like that: {error}") from None


def _is_module_name(name: Any) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) and not name.endswith(".py")


def _check_preload(names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigurationError(f"preload has to be a list of module names, not {names!r}")
    modules = tuple(names)
    for name in modules:
        if not _is_module_name(name):
            raise ConfigurationError(f"preload has to name modules such as 'transformers', not {name!r}")
    return modules


def _check_argv(args: Sequence[Any]) -> tuple[str, ...]:
    """Arguments of a script as its command line has them; numbers and paths are written out, as PySpark does."""
    for index, arg in enumerate(args, start=1):
        if not isinstance(arg, (str, os.PathLike)) and not hasattr(arg, "__float__"):
            raise ConfigurationError(
                f"arguments of a script have to be strings, numbers or paths; argument {index} is {arg!r} "
                f"({type(arg).__name__})"
            )
    return tuple(map(str, args))


def _within(script: Script, folder: Path) -> Script:
    """A script that lies in the working directory runs there, beside the modules it imports."""
    try:
        inside = Path(script.path).resolve().relative_to(folder.resolve())
    except ValueError:
        return script
    return Script(script.path, script.source, script.argv, str(inside))
