"""The command line: ``distributor run``, similar to torchrun.

The exit code is 0 on success and 2 for an invalid request. If a rank fails, it is the exit code of this rank. If a
signal ends the rank or the command, it is 128 + the number of the signal. For any other failure, it is 1.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import rich_click as click
from click import get_current_context
from click.core import ParameterSource
from click.shell_completion import get_completion_class

import distributor
from distributor.api.distributor import Distributor
from distributor.api.parameters import OPTIONS
from distributor.api.target import find_script
from distributor.cli import launch_flags
from distributor.cli.dry_run import describe
from distributor.cli.flags import arguments, declared, own, pairs
from distributor.errors import ConfigurationError, DistributorError, StartError, TrainingError
from distributor.machine.processes import signal_number
from distributor.schedulers.spark import preflight, sessions as spark_session
from distributor.text import wording
from distributor.values.job import Module
from distributor.values.options import WHAT, WHERE

_USAGE = 2

_TORCHRUN = {
    "--nproc-per-node": "belongs to torchrun: use --num-processes for the total number of ranks, and "
    "--max-processes-per-node to limit the ranks on one executor",
    "--nnodes": "belongs to torchrun: use --num-processes for the total number of ranks; Spark chooses the nodes",
    "--redirects": "belongs to torchrun: use --log-dir to keep every rank's output, and --logs to choose what is shown",
    **dict.fromkeys(
        (
            *("--master-addr", "--master-port", "--node-rank", "--standalone"),
            *("--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id"),
        ),
        "belongs to torchrun: leave it out, since nodes find each other",
    ),
}

#: Options that only the command line has, by the name of the API's option after which the help lists them.
_OWN = {
    "": [own(WHAT, "-m", "--module", is_flag=True, help="Run SCRIPT as a module, as python -m does.")],
    "launch": launch_flags.OPTIONS,
    "working_dir_limit": [own(WHAT, "--dry-run", is_flag=True, help="Print the plan and start nothing.")],
    "num_processes": [
        own(WHERE, "--local", is_flag=True, help=OPTIONS["local_mode"].help),
        own(
            WHERE,
            "--master",
            metavar="URL",
            help="Train on a Spark master: spark://host:7077, yarn, local-cluster[2,1,1024], sc://host.",
        ),
        own(WHERE, "--conf", metavar="K=V", multiple=True, help="A Spark setting; may be repeated."),
    ],
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.rich_config({"delimiter_slash": " / "})  # a line may end at a space, but not within a word
@click.version_option(distributor.__version__, prog_name="distributor")
def main() -> None:
    """Train deep networks with PyTorch on this machine or on Apache Spark."""


@main.command(context_settings={"allow_interspersed_args": False})
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@declared(_OWN)
def run(
    script: str,
    args: tuple[str, ...],
    module: bool,
    dry_run: bool,
    local: bool,
    master: str | None,
    conf: Sequence[str],
    **options: Any,
) -> None:
    """Run the training script SCRIPT in several cooperating processes. Arguments after SCRIPT are passed to it.

    \b
    Examples:
      distributor run -n 4 --local --no-gpu train.py --lr 0.1
      distributor run -n 16 --master spark://host:7077 --working-dir . train.py
      distributor run -n 8 --deepspeed ds.json -m pkg.train --epochs 3

    Without --local and --master, ranks run in the session of spark-submit or of the variable SPARK_REMOTE, or else on
    this machine. If a rank fails, the exit code is the rank's exit code, or 128 + the number of the signal that killed
    the rank. It is 2 for an invalid request, and 130 after Ctrl-C.
    """
    on_spark = _is_on_spark(local, master, conf, options["driver_ports"])
    _check_stdin(script)
    given = {
        **arguments(options),
        "launch": _launch(options),
        "keep_warm": 0.0,  # no process waits for later runs, since this command makes only one run
    }
    count, use_gpu = given.pop("num_processes"), given.pop("use_gpu")
    local_mode, where = False if master else None if on_spark else True, None
    if dry_run and on_spark:
        local_mode, where = _planned(master)
    distributor = Distributor(count, local_mode, use_gpu, **given)
    settings, target = pairs("--conf", conf), Module(script, args) if module else script
    if dry_run:
        _print_plan(distributor, target, args, where, settings)
        return
    _before_spark(master, None if module else script, options)
    _train(distributor, target, args, _session(master, settings) if on_spark else None)


@main.command("sweep")
@click.argument("script", type=click.Path())
@declared(
    {
        "": [
            own(
                WHAT,
                "--space",
                metavar="NAME=VALUES",
                multiple=True,
                required=True,
                help="What to choose from: lr=log:1e-4:1e-1, lr=uniform:0:1, depth=int:1:8 or width=32,64.",
            ),
            own(WHAT, "--metric", metavar="NAME:min", required=True, help="The reported metric, and min or max."),
            own(WHAT, "--trials", metavar="N", type=int, required=True, help="How many trials to run."),
            own(WHERE, "--at-once", metavar="N", type=int, help="How many trials run at the same time."),
        ],
        "launch": launch_flags.OPTIONS,
        "num_processes": _OWN["num_processes"],
    },
    without="resume",  # of a run with a name: the search has it, and its trials go on by themselves
)
def search(
    script: str,
    space: Sequence[str],
    metric: str,
    trials: int,
    at_once: int | None,
    local: bool,
    master: str | None,
    conf: Sequence[str],
    **options: Any,
) -> int:
    """Run SCRIPT many times with other parameters, and find the best: each trial gets arguments such as --lr 0.01.

    \b
    Example:
      distributor sweep -n 2 --local train.py --space lr=log:1e-4:1e-1 --space width=32,64 \\
          --metric val/loss:min --trials 20

    The table of trials is printed at the end. --name keeps the search, so that the same command goes on with it. The
    exit code is 2 for an invalid request, 130 after Ctrl-C, and that of a failed rank if too many trials failed.
    """
    from distributor.cli.sweep_options import read_metric, read_space
    from distributor.search.sweep import sweep

    on_spark = _is_on_spark(local, master, conf, options["driver_ports"])
    _check_stdin(script)
    given = {**arguments(options), "launch": _launch(options)}
    count, use_gpu, name = (given.pop(each) for each in ("num_processes", "use_gpu", "name"))
    asked: Any = {"metric": read_metric(metric), "trials": trials, "at_once": at_once, "name": name}
    choices = read_space(space)
    distributor = Distributor(count, False if master else None if on_spark else True, use_gpu, **given)
    _before_spark(master, script, options)
    session = _session(master, pairs("--conf", conf)) if on_spark else None
    try:
        study = sweep(distributor, script, choices, **asked)
    finally:
        if session is not None:
            session.stop()
    click.echo(repr(study.table))
    return 128 + signal.SIGINT if study.interrupted else 0


def _launch(options: dict[str, Any]) -> Any:
    """Return the launch path that the options of the current command choose."""
    source = get_current_context().get_parameter_source("launch")
    return launch_flags.choose(None if source is ParameterSource.DEFAULT else options["launch"], options)


def _before_spark(master: str | None, script: str | None, options: Mapping[str, Any]) -> None:
    """Check what can be checked before a session starts, which takes long, and say that it does."""
    if master and not _has_session():
        if script is not None:
            find_script(script, None if options["working_dir"] is None else Path(options["working_dir"]))
        preflight.check(master, os.environ, options["use_gpu"])
        if options["progress"]:
            click.echo(f"[distributor] starting a Spark session with master {wording.without_token(master)}", err=True)


@main.command("runs")
@click.argument("run", required=False, metavar="[NAME]")
def list_runs(run: str | None) -> None:
    """List this user's runs, the newest first, or show the last run with a NAME or an id: its attempts and times.

    They are remembered in the folder that the variable DISTRIBUTOR_RUNS names, by default ~/.cache/distributor/runs.
    """
    from distributor.tracking.history import History, default_folder
    from distributor.tracking.record import show

    folder = default_folder()
    records = History(folder).read()
    if run is None:
        click.echo(show(records) if records else f"no runs are remembered in {folder}")
        return
    found = [record for record in records if run in (record.label, record.id)]
    if not found:
        raise click.UsageError(f"no run {run!r} is remembered in {folder}: distributor runs lists them")
    click.echo(str(found[0]))


@main.command("script-path")
def script_path() -> None:
    """Print the path of the file for spark-submit: spark-submit ... $(distributor script-path) run ..."""
    click.echo(Path(__file__).parents[1] / "__main__.py")


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script: eval "$(distributor completion bash)"."""
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(main, {}, "distributor", "_DISTRIBUTOR_COMPLETE").source())


def start() -> NoReturn:
    """Run the command and end the process with its exit code. Entry point of ``distributor``."""
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Run a command line, report errors on stderr, and return the exit code."""
    before = signal.signal(signal.SIGTERM, _end)
    py4j, silent = logging.getLogger("py4j"), logging.NullHandler()  # it logs at length that it was interrupted
    py4j.addHandler(silent)
    try:
        ended = main.main(list(arguments), prog_name="distributor", standalone_mode=False)
        return ended if isinstance(ended, int) else 0
    except click.NoSuchOption as error:
        advice = _TORCHRUN.get(error.option_name.replace("_", "-"))
        return _complain(f"{error.option_name} {advice}" if advice else error.format_message(), _USAGE)
    except click.ClickException as error:
        return _complain(" ".join(error.format_message().split()), _USAGE)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", 128 + signal.SIGINT)
    except _Terminated:
        return _complain("terminated", 128 + signal.SIGTERM)
    except ConfigurationError as error:
        return _complain(as_options(" ".join(str(error).split())) + _misplaced(arguments), _USAGE)
    except DistributorError as error:
        return _complain(as_options(str(error)) if isinstance(error, StartError) else str(error), exit_code(error))
    finally:
        signal.signal(signal.SIGTERM, before)
        py4j.removeHandler(silent)


def exit_code(error: DistributorError) -> int:
    """Return the failed rank's exit code, or 128 + the number of the signal that killed it (as in a shell); else 1.

    >>> exit_code(DistributorError("no rank to blame"))
    1
    """
    if isinstance(error, TrainingError) and error.signal is not None:
        return 128 + signal_number(error.signal)
    return (isinstance(error, TrainingError) and error.exit_code) or 1


def as_options(text: str) -> str:
    """Return an error's text with command-line options in place of the argument names.

    >>> as_options("use_gpu=True, but ...: pass use_gpu=False, or lower num_processes")
    '--use-gpu (the default), but ...: pass --no-gpu, or lower --num-processes'
    """
    for argument, option in {
        "use_gpu=True": "--use-gpu (the default)",
        "use_gpu=False": "--no-gpu",
        "local_mode=True": "--local",
        "local_mode=False": "--master URL",
        "option 'logs'": "option --logs",
        "logs must be 'all', 'rank0', 'none' or a list of ranks": "--logs takes all, rank0, none or ranks (0,3)",
    }.items():
        text = text.replace(argument, option)
    options = {name: max(parameter.opts, key=len) for parameter in run.params if "_" in (name := parameter.name or "")}
    options["deepspeedConfig"] = "--deepspeed"
    argument = rf"(?<![\w'/.-])({'|'.join(options)})(?![\w'/-]|\.\w)(=?)"  # and no file or folder of this name
    return re.sub(argument, lambda match: options[match[1]] + match[2].replace("=", " "), text)


def _misplaced(arguments: Sequence[str]) -> str:
    """Return a hint if options of ``distributor run`` stand after the script, which then receives them; else ``""``."""
    if arguments[:1] != ["run"]:
        return ""
    known = {name for parameter in run.params for name in (*parameter.opts, *parameter.secondary_opts)}
    context = run.make_context("run", list(arguments[1:]), resilient_parsing=True)
    misplaced = [
        word for word in context.params.get("args") or () if word.partition("=")[0] in known and word[:1] == "-"
    ]
    if not misplaced:
        return ""
    belong = f"{', '.join(misplaced)} after the script belong{'s' * (len(misplaced) == 1)}"
    return f" ({belong} to the script: put distributor's options before it)"


def _is_on_spark(local: bool, master: str | None, conf: Sequence[str], driver_ports: str | None) -> bool:
    """Return whether to train on Spark. Refuse options that contradict each other, such as --local and --master."""
    if local and master:
        raise click.UsageError(
            f"--local and --master {wording.without_token(master)} exclude each other: leave one of them out"
        )
    if master:
        preflight.check_master(master)
    on_spark = bool(master) or (not local and _has_session())
    for option, value in (("--conf", conf[0] if conf else None), ("--driver-ports", driver_ports)):
        if value is not None and not on_spark:
            raise click.UsageError(f"{option} {value} is only for runs on Spark: remove it, or add --master")
    return on_spark


def _check_stdin(script: str) -> None:
    """Check that the script is not what spark-submit gives its program as standard input: a pipe that never ends."""
    with suppress(OSError):  # there is no such file
        if "PYSPARK_GATEWAY_PORT" in os.environ and os.path.samefile(script, "/dev/stdin"):
            raise click.UsageError(
                f"{script} never ends under spark-submit, which keeps its standard input to itself: write the script "
                "to a file, or run the distributor command itself with --master"
            )


def _train(distributor: Distributor, target: str | Module, args: Sequence[str], session: Any) -> None:
    """Train, and then stop the Spark session, if any."""
    try:
        if isinstance(target, Module):
            distributor.run_module(target.name, *args)
        else:
            distributor.run(target, *args)
    finally:
        if session is not None:
            session.stop()


def _planned(master: str | None) -> tuple[bool | None, str]:
    """Return the value of ``local_mode`` for the plan of a run on Spark, and where this run would train, in words."""
    if master is None:
        if "SPARK_REMOTE" in os.environ:
            return False, "the Spark session of the variable SPARK_REMOTE"
        master = spark_session.submitted_master()
        if not spark_session.has_executors(master):
            return None, "the Spark session of spark-submit"
    return False, f"Spark, master {wording.without_token(master)}"


def _print_plan(
    distributor: Distributor, target: str | Module, args: Sequence[str], where: str | None, settings: dict[str, str]
) -> None:
    """Print the plan of a run; ``where`` says where on Spark it would train, ``None`` that it would be here."""
    job = distributor.plan(target, *(() if isinstance(target, Module) else args))
    if where is not None:
        click.echo(describe(job, where, settings=settings))
        return
    from distributor.schedulers.local import LocalScheduler

    click.echo(describe(job, "this machine", LocalScheduler().placed(job)))


def _session(master: str | None, settings: dict[str, str]) -> Any:
    """Return a Spark session. The caller must stop it, even if spark-submit has started this program."""
    handlers = {number: signal.signal(number, _give_up) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # Spark's progress bar is off: it has no newline, so the next output would continue its line.
        settings = {"spark.ui.showConsoleProgress": "false", **settings}
        with ThreadPoolExecutor(1) as another:  # in the main thread, Spark would install its own signal handler
            return another.submit(spark_session.create, master, settings).result()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _give_up(number: int, _frame: FrameType | None) -> NoReturn:
    """End the JVM and this process on a signal while Spark starts, which is slow if the master does not answer.

    An exception in this handler would interrupt py4j in the middle of a call, and print pages of Java stack traces.
    """
    spark_session.end_java()
    os._exit(_complain("interrupted" if number == signal.SIGINT else "terminated", 128 + number))


def _has_session() -> bool:
    """Return whether spark-submit or ``SPARK_REMOTE`` says which Spark session to use."""
    return "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ


class _Terminated(BaseException):
    """Raised on SIGTERM, to cancel the run: ranks get their grace period, then the command ends."""


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise _Terminated


def _complain(text: str, code: int) -> int:
    click.echo(f"distributor: {text}", err=True)
    return code
