"""The options of a run, in groups that check themselves. Each is declared once, here or in ``api/parameters.py``.

A declaration has the option's default, its check, one sentence for the command line's help, and its form on the command
line. The command line is made from the declarations. A test checks that they agree with ``Distributor``'s signature and
docstring. ``docs/contributing.md`` says how to add an option.

Example:
    >>> Deadlines(grace_period=3)
    Deadlines(start_timeout=600.0, grace_period=3.0, heartbeat_timeout=30.0, stall_timeout=None)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from distributor.errors import ConfigurationError
from distributor.values.checkpoints import Checkpoints, check_checkpoints
from distributor.values.checks import (
    Check,
    check_choice,
    check_count,
    check_env,
    check_flag,
    check_gpus,
    check_logs,
    check_memory,
    check_modules,
    check_path,
    check_patterns,
    check_place,
    check_ports,
    check_seconds,
    one_of,
    optional,
)

#: The panels of ``distributor run --help``, in order.
WHAT, WHERE, RANKS, OUTPUT, LIMITS = "What to run", "Where", "Each rank", "Output", "Time limits"
PANELS = (WHAT, WHERE, RANKS, OUTPUT, LIMITS)

Kind = Literal["text", "integer", "range", "number", "switch", "path", "folder"] | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """An option's form on the command line."""

    panel: str  # of the help, from PANELS
    kind: Kind = "text"  # a path need not exist, a folder must; a tuple lists words; a switch takes no value
    names: tuple[str, ...] = ()  # in click's notation; by default, the argument's name with dashes
    metavar: str | None = None  # by default, click's name of the kind
    several: bool = False  # may be given more than once


@dataclass(frozen=True)
class Option:
    """The declaration of one option."""

    default: Any
    check: Check
    help: str  # one sentence for the command line
    flag: Flag | None = None  # None: not on the command line


def option(default: Any, check: Check, help: str, flag: Flag | None = None, *, secret: bool = False) -> Any:
    """Declare an option as a field of a group. With ``secret``, the group's ``repr`` hides the option's value."""
    return field(default=default, repr=not secret, metadata={"option": Option(default, check, help, flag)})


def declared(group: type[Group]) -> dict[str, Option]:
    """Return the declarations of a group's options, by the names of the options."""
    return {field.name: field.metadata["option"] for field in fields(group)}


@dataclass(frozen=True)
class Group:
    """Options that belong together. A group takes values as users give them, and holds the checked values."""

    def __post_init__(self) -> None:
        for name, declaration in declared(type(self)).items():
            # A frozen dataclass allows a checked value in place of the given one only through object.__setattr__.
            object.__setattr__(self, name, declaration.check(name, getattr(self, name)))
        self.check_together()

    def check_together(self) -> None:
        """Check that the values of the group's options do not contradict each other."""


@dataclass(frozen=True)
class Resources(Group):
    """The resources that a user requests. ``None`` means that the user specifies nothing."""

    num_processes: int = option(
        1,
        check_count,
        "World size: the number of ranks.",
        Flag(panel=WHERE, kind="range", names=("-n", "--num-processes"), metavar="N or MIN:MAX"),
    )
    use_gpu: bool = option(
        True,
        check_flag,
        "A GPU for each rank (default), or CPUs only.",
        Flag(panel=RANKS, kind="switch", names=("--use-gpu/--no-gpu",)),
    )
    gpus_per_process: int | None = option(
        None, optional(check_gpus), "Number of GPUs per rank.", Flag(panel=RANKS, kind="integer")
    )
    cpus_per_process: int | None = option(
        None,
        optional(check_count),
        "Number of CPUs and of OpenMP threads per rank.",
        Flag(panel=RANKS, kind="integer"),
    )
    memory_per_process: int | None = option(
        None, optional(check_memory), "Memory per rank, such as 8g.", Flag(panel=RANKS, metavar="SIZE")
    )
    max_processes_per_node: int | None = option(
        None, optional(check_count), "Maximum number of ranks on one executor.", Flag(panel=WHERE, kind="integer")
    )

    def check_together(self) -> None:
        if self.gpus_per_process is not None and not self.use_gpu:
            raise ConfigurationError(
                f"gpus_per_process={self.gpus_per_process!r} contradicts use_gpu=False: leave one of them out"
            )

    @property
    def gpus_each(self) -> int:
        """Number of GPUs of one rank if ranks use GPUs: ``gpus_per_process``, or 1 by default."""
        return self.gpus_per_process or 1


@dataclass(frozen=True)
class Deadlines(Group):
    """The time limits of a run, in seconds."""

    start_timeout: float = option(
        600.0,
        partial(check_seconds, least=0),
        "Seconds within which all ranks must be up.",
        Flag(panel=LIMITS, kind="number"),
    )
    grace_period: float = option(
        10.0, partial(check_seconds, least=0), "Seconds from SIGTERM to SIGKILL.", Flag(panel=LIMITS, kind="number")
    )
    heartbeat_timeout: float = option(
        30.0,
        partial(check_seconds, least=1),
        "Seconds of silence after which the driver and a node consider each other lost.",
        Flag(panel=LIMITS, kind="number"),
    )
    stall_timeout: float | None = option(
        None,
        optional(partial(check_seconds, least=1)),
        "Seconds after which all ranks are stopped if none writes output or uses CPU time.",
        Flag(panel=LIMITS, kind="number"),
    )


@dataclass(frozen=True)
class Output(Group):
    """Which output of ranks is shown, and which is kept."""

    logs: Literal["all"] | tuple[int, ...] = option(
        "all", check_logs, "Ranks whose lines are shown: all, rank0, none, or 0,3.", Flag(panel=OUTPUT)
    )
    fold_logs: bool = option(
        False, check_flag, "Show identical lines of several ranks once.", Flag(panel=OUTPUT, kind="switch")
    )
    log_prefix: bool = option(
        True,
        check_flag,
        "Begin each line with its rank and host (default).",
        Flag(panel=OUTPUT, kind="switch", names=("--prefix/--no-prefix",)),
    )
    log_escapes: bool = option(
        False,
        check_flag,
        "Show all escape sequences of ranks, not only colours.",
        Flag(panel=OUTPUT, kind="switch"),
    )
    log_dir: Path | None = option(
        None,
        optional(check_path),
        "Folder for files with every rank's whole output.",
        Flag(panel=OUTPUT, kind="path"),
    )
    progress: bool = option(
        True,
        check_flag,
        "Show what the run is doing (default).",
        Flag(panel=OUTPUT, kind="switch", names=("--progress/--no-progress",)),
    )

    @property
    def log_ranks(self) -> tuple[int, ...] | None:
        """The ranks whose lines the driver shows; ``None`` for all."""
        return None if self.logs == "all" else self.logs

    @property
    def keep_logs(self) -> bool:
        """Whether the driver keeps every rank's output in files, so that nodes must send all of it."""
        return self.log_dir is not None


@dataclass(frozen=True)
class Startup(Group):
    """How the processes of ranks start."""

    start_method: Literal["fork", "spawn"] = option(
        "fork",
        one_of("fork", "spawn"),
        "How ranks start: as forks of a process that has imported torch, or as new processes.",
        Flag(panel=RANKS, kind=("fork", "spawn")),
    )
    keep_warm: float = option(
        600.0,
        partial(check_seconds, least=0),
        "Seconds that a process with torch imported waits for the next run; 0 keeps no such process.",
    )
    preload: tuple[str, ...] = option((), check_modules, "Modules that the process kept by keep_warm imports.")

    def check_together(self) -> None:
        if self.preload and (self.start_method != "fork" or self.keep_warm == 0):
            raise ConfigurationError(
                f"preload={list(self.preload)!r} needs a warm process, which imports modules before a run, but there "
                f"is none with start_method={self.start_method!r} and keep_warm={self.keep_warm:g}: leave preload out, "
                "or pass start_method='fork' and a positive keep_warm"
            )


@dataclass(frozen=True)
class Training(Group):
    """How ranks are numbered within their host, and whether they must train together."""

    local_ranks: Literal["executor", "host"] = option(
        "executor",
        one_of("executor", "host"),
        "Whether ranks are numbered within their executor, or together with all ranks on their host.",
        Flag(panel=RANKS, kind=("executor", "host")),
    )
    require_group: bool | None = option(
        None,
        check_choice,
        "Fail if ranks train but never join a process group of all ranks; by default, warn.",
        Flag(panel=RANKS, kind="switch", names=("--require-group/--no-require-group",)),
    )


@dataclass(frozen=True)
class Recovery(Group):
    """Whether ranks are started again after a failure, and whether a run continues an earlier training."""

    max_restarts: int = option(
        0,
        partial(check_count, least=0),
        "How many times the ranks may be started again after a failure.",
        Flag(panel=RANKS, kind="integer"),
    )
    restart_on: Literal["infrastructure", "any"] = option(
        "infrastructure",
        one_of("infrastructure", "any"),
        "What causes a restart: failures of machines, networks and processes, or also errors in the ranks' code.",
        Flag(panel=RANKS, kind=("infrastructure", "any")),
    )
    resume: Literal["auto", "must", "never"] | None = option(
        None,
        optional(one_of("auto", "must", "never")),
        "Whether to continue an earlier training of this --name; auto does so if there is one.",
        Flag(panel=RANKS, kind=("auto", "must", "never")),
    )


@dataclass(frozen=True)
class Variables(Group):
    """Environment variables for the ranks. They may hold secrets, so ``repr`` does not show the values of ``env``."""

    env: Mapping[str, str] = option(
        None,
        lambda name, env: check_env(name, {} if env is None else env),
        "Environment variable for all ranks; may be repeated.",
        Flag(panel=RANKS, metavar="K=V", several=True),
        secret=True,
    )
    forward_env: tuple[str, ...] = option(
        (),
        check_patterns,
        "Variables of this machine to forward to all ranks, such as 'WANDB_*'; may be repeated.",
        Flag(panel=RANKS, metavar="PATTERN", several=True),
    )


@dataclass(frozen=True)
class Project(Group):
    """The project folder, the folder for output files and the folder for checkpoints, as the user gives them.

    In a job, objects of the classes ``WorkingDir``, ``OutputDir`` and ``Checkpoints`` describe the run's folders."""

    working_dir: Path | None = option(
        None,
        optional(check_path),
        "Project folder in which ranks run; executors get a copy.",
        Flag(panel=WHAT, kind="folder"),
    )
    working_dir_limit: int = option(
        "256m",
        check_memory,
        "Maximum size of executors' copies of --working-dir, such as 1g.",
        Flag(panel=WHAT, metavar="SIZE"),
    )
    output_dir: str | None = option(
        None,
        optional(check_place),
        "Folder or URL that receives the files that ranks write.",
        Flag(panel=OUTPUT, kind="text", metavar="FOLDER"),
    )
    output_limit: int = option(
        "1g", check_memory, "Maximum size of the files in --output-dir, such as 8g.", Flag(panel=OUTPUT, metavar="SIZE")
    )
    checkpoints: Checkpoints | None = option(
        None,
        optional(check_checkpoints),
        "Folder that all nodes see, or URL, for the checkpoints of ranks.",
        Flag(panel=OUTPUT, metavar="FOLDER"),
    )


@dataclass(frozen=True)
class Network(Group):
    """How executors reach the driver."""

    driver_ports: tuple[int, int] | None = option(
        None,
        optional(check_ports),
        "Ports on which the driver may listen for executors.",
        Flag(panel=WHERE, metavar="A-B"),
    )
