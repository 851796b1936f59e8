"""The public API: takes requests and starts runs."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from distributor.api.arguments import arguments_of
from distributor.api.build import (
    build_job,
    check_packages,
    make_log_folder,
    make_output_dir,
    pack_output_dir,
    pack_working_dir,
)
from distributor.api.forewarn import deepspeed_on_cpus, fsdp_on_cpus, large_call
from distributor.api.identity import identify
from distributor.api.parameters import GROUPS, Options, check_data, suggests_names
from distributor.api.scheduling import active_session, check_gpus, choose_scheduler, choose_session, is_here
from distributor.api.target import find_target, named_module
from distributor.data.source import shared_by
from distributor.display.choose import choose as choose_view
from distributor.display.view import View
from distributor.errors import DistributorError, show_shortly
from distributor.run.handle import Run
from distributor.run.interrupt import plain_interrupts
from distributor.run.supervisor import Feed
from distributor.text import notices
from distributor.tracking.history import Recorder
from distributor.values.checkpoints import Checkpoints
from distributor.values.checks import check_range
from distributor.values.job import Job, Widths
from distributor.values.launch_path import Launch, LaunchPath
from distributor.values.options import declared
from distributor.values.trial_info import TrialInfo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distributor.schedulers.base import Scheduler


#: Number of seconds that Ctrl-C waits for the ranks to end, in addition to the grace period.
_MARGIN = 10.0

P = ParamSpec("P")
T = TypeVar("T")


class Distributor:
    """Trains PyTorch models on this machine or on Spark executors.

    A drop-in replacement for ``pyspark.ml.torch.distributor.TorchDistributor``. All arguments that PySpark's class
    lacks are keyword-only.

    Args:
        num_processes: the world size, which is the number of ranks that train together. With a range such as
            ``(4, 16)``, a run starts with as many ranks as free slots allow. After the loss of a node, the run goes on
            with the slots that are left, if ``max_restarts`` allows another attempt. Once a minute, the run looks for
            free slots. If there are some, the run asks its ranks to stop together (``runtime.should_stop``), and goes
            on with more ranks. Spark Connect does not report free slots: a run starts with as many ranks as the
            session's settings allow (with the smallest number if they do not say), and never gets more.
        local_mode: ``True`` trains on this machine, without Spark or Java. ``False`` trains as tasks of the active
            Spark session; but if the session's master is ``local[...]``, ranks that use GPUs train on this machine
            without Spark. ``None`` (default) trains on the session's executors if the active session is on a cluster
            (standalone, YARN, Kubernetes, ``local-cluster``, Spark Connect), otherwise on this machine.
        use_gpu: give each rank its own GPU, ``cuda:LOCAL_RANK`` (default). ``False`` hides all GPUs from ranks.
        launch: how ranks are started: ``"torchrun"`` (default), ``"accelerate"``, ``"deepspeed"``, ``"jax"``,
            ``"mpi"``, ``"mpi-env"``, ``"ray"`` or ``"tensorflow"``, or a launch path with its own options, such as
            ``distributor.launch.DeepSpeed(config)``.
        name: the run's name in the status, in most lines that the driver prints about the run, in ``repr(run)`` and in
            the Spark UI (as the job's description, on classic sessions). It is one line of at most 100 characters.
        env: environment variables for the ranks. They override all other variables, except those that the run sets for
            each rank. ``env`` must not contain ``RANK`` and the other variables that torchrun sets for each rank.
        forward_env: names, or patterns such as ``"WANDB_*"``, of the driver's environment variables that ranks on
            executors get too.
        working_dir: a project folder that becomes the ranks' current directory and comes first on their import path
            (after the folder of a script). In local mode, ranks use the folder itself; executors get a copy, which is
            removed at the end. The copy lacks ``.git``, ``.venv``, ``venv``, Python's caches, the temporary directory,
            and the folders of ``output_dir``, ``checkpoints`` and ``log_dir``. Scripts, and in local mode modules too,
            are looked up in this folder first, then in the current directory.
        working_dir_limit: maximum total size of the files in the executors' copy of ``working_dir``, in bytes or as
            ``"1g"`` (default 256 MiB).
        output_dir: receives all files that ranks write to relative paths. It is a folder on the driver, or an fsspec
            URL such as ``"s3://bucket/run"`` that the driver and all executors can reach. When a rank closes a file,
            the file is copied there under its relative path, even if the run fails later. When a rank removes a file,
            it is removed from ``output_dir`` too. If nodes write different bytes to the same path, the file of the node
            with the lowest node rank keeps the name, and the files of other nodes get their node rank as a suffix:
            ``.node-1``, ``.node-2``, .... Files that are in the folder before the run are copied into each rank's
            current directory. In local mode, they replace no file there, and files that ranks write also stay where
            they are. Without ``output_dir``, executors remove the files that ranks write to relative paths when the run
            ends, and a warning says so as soon as a rank has written one.
        output_limit: maximum total size of the files in ``output_dir``, in bytes or as ``"8g"`` (default 1 GiB). If the
            folder holds more before the run, this is an error, and no rank starts. If a new file would exceed the
            limit, it is not copied, and a warning says so when the run ends.
        checkpoints: where ranks keep checkpoints (``runtime.save_checkpoint``, ``runtime.checkpoint_folder``): a folder
            that all nodes see under the same path, an fsspec URL such as ``"s3://bucket/run"``, or
            ``Checkpoints(dir, keep=3, best=("val_loss", "min"))``. Before ranks run your code, one rank of each node
            checks that the node sees the same folder and can write to it.
        gpus_per_process: number of GPUs for each rank (default 1 with ``use_gpu``). A rank's first GPU is always
            ``cuda:LOCAL_RANK``. The others follow at intervals of ``LOCAL_WORLD_SIZE``: with two ranks on a node and
            two GPUs per rank, local rank 0 has ``cuda:0`` and ``cuda:2``.
        cpus_per_process: number of CPUs and of OpenMP threads for each rank (default: ``spark.task.cpus``, or in local
            mode the rank's share of the machine).
        memory_per_process: memory that each rank can count on, in bytes or as ``"8g"``. An executor gets only as many
            ranks as fit into its memory beside the JVM heap (``spark.executor.memoryOverhead``).
        max_processes_per_node: maximum number of ranks on one executor.

            On Spark, ``gpus_per_process``, ``cpus_per_process``, ``memory_per_process`` and ``max_processes_per_node``
            apply to this run only. If they request other numbers of CPUs or GPUs than the session's own tasks have, the
            run needs stage-level scheduling, which standalone clusters, YARN and Kubernetes provide (YARN and
            Kubernetes from Spark 3.5.1 on, Spark Connect from Spark 4.0 on).
        start_timeout: number of seconds within which all ranks must be up, including the wait for executors
            (default 600).
        grace_period: number of seconds from SIGTERM to SIGKILL when ranks are stopped (default 10). Ranks can save in
            this time. But before a restart, ranks that are not writing a file may be killed at once, without SIGTERM.
        heartbeat_timeout: number of seconds of silence after which the driver and a node consider each other lost
            (default 30).
        stall_timeout: number of seconds without any output or CPU use by any rank, after which all ranks are stopped
            (default: never). If ``max_restarts`` allows no other attempt, the run ends with a :class:`StallError`.
            Ranks that wait in an NCCL collective keep using the CPU, so only NCCL's own timeout detects a hang there.
        logs: the ranks whose lines are shown: ``"all"`` (default), ``"rank0"``, ``"none"``, or a list of ranks.
        fold_logs: show identical lines of several ranks once, as ``[ranks 0-15] ...``. Lines may appear half a second
            later.
        log_prefix: start each line with its rank and host, ``[rank 3 host-b]`` (default).
        log_escapes: show all escape sequences that ranks write. By default only colours (SGR) are shown: other
            sequences move the cursor, set the terminal's title or write to the clipboard.
        log_dir: a folder on the driver that receives every rank's whole output, byte for byte and regardless of
            ``logs``. The files of rank 3 are ``<run id>/rank-3.stdout`` and ``<run id>/rank-3.stderr``.
        progress: show what the run is doing (default). In a terminal, this is a live status while you wait; in Jupyter,
            a status that stays below the cell; elsewhere, an occasional line on stderr about a step that takes a long
            time.
        driver_ports: first and last port on which the driver may listen for executors, for firewalls that open only
            some ports (default: any free port).
        keep_warm: number of seconds (default 600) for which a process that has imported torch waits for the next run,
            on each executor or, in local mode, beside the driver. With this process, the next run starts in tenths of a
            second. The process runs none of your code, and ends with its executor or driver. 0 keeps no such process.
        preload: modules that the process kept by ``keep_warm`` imports as well, such as ``["transformers"]``, so that
            ranks need not import them.
        start_method: ``"fork"`` (default) forks the ranks from a process that has imported torch but none of your code.
            ``"spawn"`` starts each rank as a new process, which imports torch itself.
        local_ranks: what ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` count. ``"executor"`` (default): the ranks of the
            executor. ``"host"``: the ranks of all executors on its host, for libraries that coordinate by host, such as
            mosaicml-streaming; only without GPUs.
        require_group: what happens if ranks train (run a backward pass or an optimizer step) but never join a process
            group of all ranks. Each rank would then train its own model. ``None`` (default) warns, ``True`` raises a
            :class:`GroupError`, ``False`` does nothing.
        max_restarts: how many times all ranks are started again after a failure (default 0). They start on the same
            nodes within the same Spark job, or in a new job, for example if a node was lost. If three attempts in a
            row neither reach nor save a later step than the attempts before them, the run ends.
        restart_on: the failures after which ranks are started again. ``"infrastructure"`` (default): a rank was killed
            by a signal, a node was lost, a collective or the store failed, or the ranks stalled. ``"any"``: also an
            exception in the user's code, or a rank's exit code other than 0.
        resume: whether a run with ``name=`` and ``checkpoints=`` continues an earlier run of the same name.
            ``"auto"`` (default): yes, if there is one. ``"must"``: yes; it is an error if there is none.
            ``"never"``: no, the run starts over in a folder of its own. A run cannot continue one that had another
            function or script, or that has finished with the same code and arguments: this is an error. With changed
            code or arguments, such as more epochs, a run continues even one that has finished; a warning says what has
            changed. Only one run at a time can use a name.
        callbacks: objects with any of the methods ``on_start(run)``, ``on_metrics(run, rows)``,
            ``on_checkpoint(run, checkpoint)``, ``on_attempt_end(run, attempt)``, ``on_end(run)``, ``on_close(run)`` and
            ``on_study_end(study)``. The methods are called on the driver, in a thread of their own. ``rows`` are the
            ranks' reports since the last call, ``checkpoint`` has the ``step`` and the ``path`` of a committed
            checkpoint, and ``attempt`` is one of ``run.attempts``. ``on_close`` follows the ``on_end`` of all
            callbacks, and :func:`sweep` calls ``on_study_end`` with its study. An error in a callback is only logged as
            a warning. ``run()`` and ``wait()`` return once all have returned, at most a minute after the run's end,
            or as soon as ``MLflow(register=...)`` has registered a model.
        data: tables for the ranks by name, such as ``{"train": Data(df, pack={"x": ["age", "height"]}, label="y")}``.
            Ranks read them with ``runtime.dataset("train").loader(...)``. Before training, each table is written once
            as Arrow files: beside the checkpoints with ``checkpoints=``, and then kept as long as a checkpoint refers
            to it; otherwise, on one machine, to a temporary folder. On a cluster without ``checkpoints=``, pass a
            :func:`snapshot`.

    Raises:
        ConfigurationError: an argument is wrong; the message names the argument, its value, and what to do.
        ResourceError: there are fewer GPUs than requested or, if ``use_gpu`` is true, fewer CPUs or less memory. If
            this is not known yet, for example because ``local_mode`` is ``None``, ``run`` raises this error, not the
            constructor.

    Example:
        >>> def train(learning_rate, epochs=1):
        ...     import torch.distributed as dist
        ...     dist.init_process_group("gloo")
        ...     return dist.get_world_size()
        >>> Distributor(num_processes=2, local_mode=True, use_gpu=False).run(train, 1e-3)  # doctest: +SKIP
        2
    """

    _trial: TrialInfo | None = None  # the trial that the runs are

    @suggests_names
    def __init__(
        self,
        num_processes: int | tuple[int, int] = 1,
        local_mode: bool | None = None,
        use_gpu: bool = True,
        *,
        launch: Launch | str = "torchrun",
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        forward_env: Sequence[str] = (),
        working_dir: str | os.PathLike[str] | None = None,
        working_dir_limit: int | str = "256m",
        output_dir: str | os.PathLike[str] | None = None,
        output_limit: int | str = "1g",
        checkpoints: str | os.PathLike[str] | Checkpoints | None = None,
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
        log_escapes: bool = False,
        log_dir: str | os.PathLike[str] | None = None,
        progress: bool = True,
        driver_ports: tuple[int, int] | None = None,
        keep_warm: float = 600.0,
        preload: Sequence[str] = (),
        start_method: Literal["fork", "spawn"] = "fork",
        local_ranks: Literal["executor", "host"] = "executor",
        require_group: bool | None = None,
        max_restarts: int = 0,
        restart_on: Literal["infrastructure", "any"] = "infrastructure",
        resume: Literal["auto", "must", "never"] | None = None,
        callbacks: Sequence[object] = (),
        data: Mapping[str, Any] | None = None,
    ) -> None:
        widths = Widths(*check_range("num_processes", num_processes))
        self._widths = widths = shared_by(widths, check_data("data", data))
        given = {name: value for name, value in locals().items() if name not in ("self", "widths")}
        self._options = options = Options.of(**{**given, "num_processes": widths.most})
        self._launch: LaunchPath = self._launch_of(widths.least)
        check_gpus(self.local_mode, replace(options.resources, num_processes=widths.least))

    def _with(self, *, trial: TrialInfo | None = None, **changed: Any) -> Distributor:
        """Return a copy with other values of some options."""
        made = copy.copy(self)
        made._trial = trial
        groups = {group: getattr(self._options, group) for group in GROUPS}
        made._options = replace(
            self._options,
            **{
                group: replace(held, **{name: changed[name] for name in declared(type(held)) if name in changed})
                for group, held in groups.items()
            },
        )
        return made

    def _narrowest(self) -> Distributor:
        """Return a copy whose runs always have the smallest number of ranks."""
        made = self._with(num_processes=self._widths.least)
        made._widths = Widths(self._widths.least, self._widths.least)
        return made

    @property
    def num_processes(self) -> int:
        """The number of ranks; if a range was given, its upper bound."""
        return self._options.resources.num_processes

    @property
    def local_mode(self) -> bool | None:
        """Where ranks train: the argument ``local_mode``, as given to the constructor."""
        return self._options.request.local_mode

    @property
    def use_gpu(self) -> bool:
        """Whether ranks use GPUs."""
        return self._options.resources.use_gpu

    def __repr__(self) -> str:
        request = f"num_processes={self.num_processes}, local_mode={self.local_mode}, use_gpu={self.use_gpu}"
        return f"{type(self).__name__}({request})"

    @overload
    def run(self, train_object: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...

    @overload
    def run(self, train_object: str | os.PathLike[str], *args: str | float | os.PathLike[str]) -> None: ...

    def run(self, train_object: Any, *args: Any, **kwargs: Any) -> Any:
        """Train and return rank 0's return value.

        Equivalent to ``submit(...).result()``, except that only rank 0's return value is sent to the driver, and that
        Ctrl-C stops the run.

        Args:
            train_object: a callable, or the path of a ``.py`` file on the driver.
            args: arguments of the callable or file. A file takes strings, numbers, paths and enums, and receives them
                as text.
            kwargs: keyword arguments of the callable; a file takes none.

        Raises:
            ConfigurationError: the input is wrong. If possible, this error is raised before anything is started.
            TrainingError: a rank failed.
            StartError, CompanionError, NodeLostError, StallError, GroupError: see each class.
            PreemptionError, StopError, ResultError, RunCancelledError: see each class.
            KeyboardInterrupt: Ctrl-C was pressed; raised once the ranks have ended.

        Example:
            >>> Distributor(4, use_gpu=False).run("train.py", "--lr", "0.1")  # doctest: +SKIP
        """
        return self._wait(*self._prepare(train_object, args, kwargs, "rank0"))

    def submit(self, train_object: Any, *args: Any, **kwargs: Any) -> Run:
        """Start training and return the run's handle at once. Arguments and input errors are as in :meth:`run`.

        Example:
            >>> run = Distributor(4, use_gpu=False).submit(train, 1e-3)  # doctest: +SKIP
            >>> run.results()  # doctest: +SKIP
        """
        return self._begin(*self._prepare(train_object, args, kwargs, "all"))

    def run_module(self, module: str, /, *args: str) -> None:
        """Train with a module, run as ``python -m module args...``. Raises the errors of :meth:`run`."""
        self._wait(*self._prepare(named_module(module, args), (), {}, "rank0"))

    def submit_module(self, module: str, /, *args: str) -> Run:
        """Start training with a module, as :meth:`run_module` does, but return the run's handle at once."""
        return self._begin(*self._prepare(named_module(module, args), (), {}, "rank0"))

    def _wait(self, run: Run, notes: Sequence[str], ask: Callable[[Run], Any] = Run.result) -> Any:
        """Start a run, and return what ``ask`` returns. If interrupted at any moment, end its ranks first."""
        with plain_interrupts():
            try:
                try:
                    return ask(run.start(notes))
                except KeyboardInterrupt:
                    if not run._leave_callbacks():
                        raise
                    return ask(run)
            except DistributorError as error:
                error.__traceback__ = None  # hides the frames of this package
                raise
            except BaseException as error:
                self._stop(run, error)
                if isinstance(error, KeyboardInterrupt):
                    show_shortly(error)
                    error.__traceback__ = None
                raise

    def _begin(self, run: Run, notes: Sequence[str]) -> Run:
        """Start a run and return it. If the start is interrupted, stop the run, because the caller gets no handle."""
        try:
            return run.start(notes)
        except BaseException as error:
            self._stop(run, error)
            raise

    def _stop(self, run: Run, error: BaseException) -> None:
        """Stop a run whose start, or the wait for it, was interrupted by Ctrl-C or by a signal handler's exception."""
        try:
            if not run.delete():
                if isinstance(error, KeyboardInterrupt):
                    run.cancel("interrupted (interrupt again to end all ranks at once)", say_where=True)
                else:
                    run.terminate(say_where=True)
                run.wait(self._options.deadlines.grace_period + _MARGIN)
        except BaseException:
            run.kill()
            run.wait(_MARGIN)

    def _prepare(
        self, train_object: Any, args: Sequence[Any], kwargs: Mapping[str, Any], collect: Literal["rank0", "all"]
    ) -> tuple[Run, Sequence[str]]:
        """Return a run that has not been started yet, and the lines to print when it starts."""
        (session, _), output = choose_session(self.local_mode, self.use_gpu), self._options.output
        view = choose_view() if output.progress else None
        scheduler = choose_scheduler(session, self.use_gpu)
        job = self._job(train_object, args, kwargs, collect, scheduler, local=session is None, view=view)
        scheduler.check(job)
        if data := self._options.request.data:
            from distributor.data import feeding  # imports pyarrow

            feeding.check(data, job.checkpoints, one_machine=is_here(session))
        environ = os.environ if session is None else {}
        warnings = (
            fsdp_on_cpus(job, environ),
            deepspeed_on_cpus(job, environ),
            large_call(job, train_object, args, kwargs),
        )
        for text in warnings:
            if text is not None:
                notices.logger.warning("run %s: %s", job.label, text)
        make_output_dir(job.output_dir)
        log_folder = make_log_folder(output.log_dir, job.run_id)
        run = Run(
            job,
            scheduler,
            log_folder=log_folder,
            announce=view is not None and view.announces and session is not None,
            view=view,
            resize=None if job.widths is None else self._resize(),
            callbacks=(Recorder(), *self._options.request.callbacks),
            feed=self._feed() if self._options.request.data else None,
            arguments=arguments_of(job.target, train_object, args, kwargs),
            trial=self._trial,
        )
        return run, () if view is None else self._notes(session, log_folder)

    def _feed(self) -> Feed:
        from distributor.data import feeding

        data = self._options.request.data
        return lambda job, wanted: feeding.feed(job, data, wanted)

    def _resize(self) -> Callable[[Job, int], Job]:
        """Return a function that gives a job another width; ConfigurationError if the launch path cannot have it."""
        launch_of = cache(self._launch_of)  # a launch path may read files: read them once for each number

        def resized(job: Job, width: int) -> Job:
            if width == job.resources.num_processes:
                return job
            shared_by(Widths(width, width), self._options.request.data)
            return replace(job, resources=replace(job.resources, num_processes=width), launch=launch_of(width))

        return resized

    def _launch_of(self, width: int) -> LaunchPath:
        return self._options.request.launch.resolve(width, self.use_gpu)

    def _notes(self, session: SparkSession | None, log_folder: Path | None) -> list[str]:
        """Return lines about what may surprise the user."""
        notes = []
        spark_is_there = sys.modules.get("pyspark") is not None
        if session is None and self.local_mode is None and spark_is_there and active_session() is None:
            notes.append("training on this machine, because no Spark session is active")
        if session is None and self.local_mode is False:
            notes.append("training on this machine with its GPUs, because the Spark session's master is local")
        if log_folder is not None:
            shown = str(log_folder)
            with suppress(FileNotFoundError):  # the current directory may be gone
                shown = min(shown, os.path.relpath(log_folder), key=len)
            notes.append(f"all output goes to {shown}")
        return notes

    def plan(self, train_object: Any, *args: Any, **kwargs: Any) -> Job:
        """Return the job that :meth:`submit` would start: checked and packed, but not started.

        If the user asks for Spark and there is no session yet, the fields of the job that depend on a session have
        their defaults.

        Args:
            train_object: as in :meth:`run`, or a :class:`distributor.values.job.Module`.
            args, kwargs: as in :meth:`run`.

        Raises:
            ConfigurationError: as in :meth:`run`.

        Example:
            >>> Distributor(2, True, use_gpu=False).plan("train.py", "--lr", 0.1).target.argv  # doctest: +SKIP
            ('--lr', '0.1')
        """
        session, local = choose_session(self.local_mode, self.use_gpu, needed=False)
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
        asked = self._options.project
        if local:
            check_packages(self._launch)
        python_path = self._options.variables.env.get("PYTHONPATH", "")
        target = find_target(
            train_object, args, kwargs, working_dir=asked.working_dir, local=local, python_path=python_path
        )
        folders = (
            pack_working_dir(asked, local=local, view=view, log_dir=self._options.output.log_dir),
            pack_output_dir(asked, local=local, view=view),
        )
        job = build_job(self._options, self._widths, self._launch, target, folders, scheduler, os.environ, collect)
        if job.name is None or job.checkpoints is None:
            return job
        identity = identify(job.name, job.recovery.resume or "auto", target, train_object, args, kwargs)
        return replace(job, identity=identity)


class TorchDistributor(Distributor):
    """:class:`Distributor` under PySpark's name."""

    __doc__ = f"{Distributor.__doc__}"  # for help(): the arguments are the same
