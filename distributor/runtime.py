"""Functions for use inside a rank. All but ``deepspeed_config()`` and ``dataset()`` also work outside a run.

The functions about ranks read torchrun's environment variables (``RANK``, ``WORLD_SIZE``, ...). Without these
variables, the functions return the values of a run with one rank, so the same script also runs without a launcher. If a
variable is set, but not to a whole number, the functions raise a ``ConfigurationError``.

Example:
    >>> from distributor import runtime
    >>> print(f"rank {runtime.rank()} of {runtime.world_size()}")
    rank 0 of 1

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from distributor.errors import ConfigurationError
from distributor.launch.deepspeed.path import CONFIG_PATH
from distributor.metrics import rank as reports
from distributor.stopping import rank as stopping

if TYPE_CHECKING:
    from distributor.checkpoint.context import Checkpoint
    from distributor.checkpoint.exchange import Exchange
    from distributor.data.loader import RankDataset


def rank() -> int:
    """Return this process's rank, from 0 to ``world_size() - 1``.

    Raises:
        ConfigurationError: ``RANK`` is set, but not to a whole number.
    """
    return _variable("RANK", 0)


def world_size() -> int:
    """Return the number of ranks that train together."""
    return _variable("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return this process's rank ``N`` within its node. With GPUs, the rank's device is ``cuda:N``."""
    return _variable("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Return the number of ranks on this node, which is a Spark executor or a machine."""
    return _variable("LOCAL_WORLD_SIZE", 1)


def node_rank() -> int:
    """Return this node's rank among all nodes, counted from 0."""
    return _variable("GROUP_RANK", 0)


def attempt() -> int:
    """Return the number of earlier attempts of this run, for whatever reason they ended: 0 in the first attempt."""
    return _variable("TORCHELASTIC_RESTART_COUNT", 0)


def accumulation_steps(global_batch: int, per_rank_batch: int) -> int:
    """Return the number of micro-batches that each rank runs for one global batch.

    Args:
        global_batch: number of samples of one optimizer step, over all ranks.
        per_rank_batch: number of samples of one forward pass of one rank.

    Raises:
        ConfigurationError: an argument is less than 1, or ``global_batch`` is not a multiple of
            ``per_rank_batch * world_size()``.

    Example:
        >>> accumulation_steps(256, 32)  # a run of one rank
        8
    """
    at_once = per_rank_batch * world_size()
    if per_rank_batch < 1:
        raise ConfigurationError(f"per_rank_batch={per_rank_batch!r} must be at least 1: change per_rank_batch")
    if global_batch < 1 or global_batch % at_once:
        raise ConfigurationError(
            f"global_batch={global_batch!r} must be a positive multiple of per_rank_batch * world_size() = "
            f"{per_rank_batch!r} * {world_size()}: change global_batch or per_rank_batch"
        )
    return global_batch // at_once


def report(
    metrics: Mapping[str, Any] | None = None,
    /,
    *,
    step: int | None = None,
    total_steps: int | None = None,
    **values: Any,
) -> None:
    """Report metrics of the training to the driver, for ``run.metrics``, ``run.progress`` and callbacks.

    Any rank may report, any number of times, without waiting for other ranks or the driver. Outside a run, the
    arguments are checked, but nothing is reported. If a rank reports more than 8 MiB (about 80,000 reports) in an
    attempt, only every other report is kept, then every fourth, and so on. With more than 4 ranks, the limit is lower;
    see ``docs/metrics.md``.

    Args:
        metrics: values by name, for names that are not Python identifiers, such as ``"val/loss"``.
        step: the step of the training, for ``run.progress`` and as the x-axis of ``run.plot()``.
        total_steps: number of steps of the whole training. It is enough if the lowest rank that reports steps reports
            it once in each attempt.
        **values: values by name. A value is a number, or a tensor or an array of one element.

    Raises:
        ConfigurationError: a value is not a number, ``step`` or ``total_steps`` is not a whole number, or the report is
            longer than 64 KiB.

    Example:
        >>> report(step=1, total_steps=100, loss=0.25)
        >>> report({"val/loss": 0.5}, step=1)
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigurationError(
            f"report(): values need names, as in report(loss=0.5) or report({{'val/loss': 0.5}}), not {metrics!r:.100}"
        )
    reports.add({**metrics, **values} if metrics is not None else values, step, total_steps)


def should_stop(step: int) -> bool:
    """Return whether all ranks must stop at this step.

    Ranks must stop in three cases: ``run.stop()`` was called; the run is preempted, which means that a rank or
    its node gets SIGTERM or that Spark decommissions an executor; or the run can go on with more ranks.

    Call this function on all ranks with the same values of ``step``, each larger than the one before. It returns
    ``True`` on all ranks at the same step. It is not a collective: a rank waits only at the step at which the driver
    proposes to stop, until all nodes have agreed. When it returns ``True``, save a checkpoint and end the training.

    Ranks need not call this function at every step. But if a rank leaves out a call that other ranks make, ranks may
    stop at different steps. The attempt then fails with a ``StopError``; with ``max_restarts``, the ranks are started
    again. A rank that never calls this function does not delay the other ranks, and goes on when they stop.

    After the first call of this function in the main thread, SIGTERM does not end the rank, but asks all ranks to stop
    together. It still ends the rank if the run itself stops its ranks, for example after ``run.cancel()``, or if the
    node cannot reach the driver. (If user code has installed its own handler for SIGTERM, that handler stays.) When
    ranks stop because of a preemption, their return values are dropped. With ``max_restarts``, the run goes on in a new
    attempt, and the stop does not count as a restart. Without ``max_restarts``, the run ends with a
    ``PreemptionError``.

    Outside a run, or if nodes cannot reach the driver, the result is always ``False``.

    Args:
        step: the step of the training, from 0 on.

    Raises:
        ConfigurationError: ``step`` is not a whole number, or is less than 0.
        StopError: the driver has proposed that all ranks stop at this step or an earlier one, but did not say within 60
            seconds whether all nodes agree.

    Example:
        >>> should_stop(step=1)  # outside a run
        False
    """
    return stopping.should_stop(step)


@overload
def save_checkpoint(
    state: Mapping[str, Any], step: int, *, wait: Literal[True], weights_only: bool = True
) -> Checkpoint: ...


@overload
def save_checkpoint(
    state: Mapping[str, Any], step: int, *, wait: bool = False, weights_only: bool = True
) -> Checkpoint | None: ...


def save_checkpoint(
    state: Mapping[str, Any], step: int, *, wait: bool = False, weights_only: bool = True
) -> Checkpoint | None:
    """Save the state of the training as a checkpoint. All ranks must call this function together, with the same step.

    The function copies the state and returns. A thread then writes the copies while training goes on. The next save,
    and the end of the rank, wait for this thread. The checkpoint is committed once all ranks have written their parts:
    from then on it counts as complete, and can be loaded; see ``docs/checkpoints.md``. If the checkpoint cannot be
    written, rank 0 logs a warning, training goes on, and earlier checkpoints stay. So does the driver at the run's end,
    if no later save has succeeded.

    Args:
        state: what to save, by name: modules, optimizers, schedulers, anything else with ``state_dict()`` and
            ``load_state_dict()``, and plain values. The random states of Python, NumPy and torch are always saved.
            Modules may be plain, in DistributedDataParallel, or split by ``fully_shard``. Each rank saves its part of
            the split tensors, and rank 0 saves the tensors that every rank has in full. Each rank saves its own values
            of all other entries.
        step: the step of the training.
        wait: return only after the checkpoint is committed; raise an error if it cannot be.
        weights_only: refuse objects whose loading may run code (default), as ``load_checkpoint`` does. NumPy's numbers
            become Python's.

    Returns:
        With ``wait``, the committed checkpoint. Files from a URL are in its ``path`` once ``latest_checkpoint()`` has
        downloaded them.

    Raises:
        ConfigurationError: the run has no ``checkpoints=``, the ranks do not call this and the other checkpoint
            functions in the same order, ``step`` is not a whole number of at least 0, the name of an entry is not
            allowed, a module uses FullyShardedDataParallel, ``weights_only`` refuses an object, the first save finds
            that a parameter that is not split differs between ranks (it compares some values of each), or several ranks
            outside a run have not called ``init_process_group``.
        OSError: with ``wait``, the checkpoint could not be written: on all ranks, with the reason.
        AttributeError, TypeError, pickle.PicklingError: a value in ``state`` cannot be pickled.
        RuntimeError: another rank has failed in this call; that rank's exception says why.

    Example:
        >>> save_checkpoint({"model": model, "optimizer": optimizer, "epoch": 3}, step=1200)  # doctest: +SKIP
    """
    from distributor.checkpoint.saving import save_checkpoint as save

    with reports.spending("saving"):
        return save(state, step, wait=wait, weights_only=weights_only)


def load_checkpoint(
    state: Mapping[str, Any],
    *,
    folder: str | os.PathLike[str] | None = None,
    best: tuple[str, Literal["min", "max"]] | None = None,
    weights_only: bool = True,
) -> int | None:
    """Load the last committed checkpoint into ``state``, and return its step; ``None`` if there is none.

    There is none either in a run without ``checkpoints=``, which a warning says. With ``folder``, none is an error, as
    are checkpoints of which none has the metric of ``best``.

    With ``Checkpoints(memory=True)``, restarted ranks load the newest state that the nodes' memory holds for all ranks,
    unless a newer checkpoint was committed.

    All ranks must call this function together. The number of ranks and the way in which modules are split may have
    changed since the save. A checkpoint with files that are missing, damaged or cannot be read is skipped. A warning on
    the driver says which checkpoint was skipped, why, and which one was loaded instead.

    Args:
        state: what to load into, with the names given to ``save_checkpoint``. Modules, optimizers and objects with
            ``load_state_dict()`` are changed in place; plain values are replaced in the dict.
        folder: where the checkpoint is, if it is not this run's: the folder or URL that a run had as ``checkpoints=``,
            or the name of a run that had the same one as this run (outside a run, as ``DISTRIBUTOR_CHECKPOINTS``), or
            the folder of one checkpoint, such as ``runs()[0].checkpoint``.
        best: a metric and ``"min"`` or ``"max"``: load the checkpoint with its best value in place of the last one.
        weights_only: refuse objects that may run code when they are loaded (default), as in ``torch.load``.

    Raises:
        ConfigurationError: ``folder`` has no checkpoint, or there are checkpoints of which none has the metric of
            ``best``, the ranks do not call this and the other checkpoint functions in the same order, several ranks
            outside a run have not called ``init_process_group``, a module uses FullyShardedDataParallel or is on the
            meta device, or the checkpoint belongs to another model or to an optimizer of other parameters, contains
            objects that ``weights_only`` refuses, or was written by ``checkpoint_folder`` (such checkpoints are passed
            over if the place has others).
        OSError: the folder or URL of checkpoints cannot be read; or no checkpoint can be loaded, but some may be whole.
        RuntimeError: another rank has failed in this call; the error quotes that rank's error.

    Example:
        >>> step = load_checkpoint({"model": model, "optimizer": optimizer}) or 0  # doctest: +SKIP
    """
    from distributor.checkpoint.loading import load_checkpoint as load

    with reports.spending("loading"):
        return load(state, folder=folder, best=best, weights_only=weights_only)


@contextmanager
def checkpoint_folder(step: int) -> Iterator[Path]:
    """Yield an empty folder for the files of a checkpoint. All ranks must enter the ``with`` block together.

    Each rank gets a folder of its own, and may write any files into it, for example with
    ``torch.distributed.checkpoint``. When all ranks have left the ``with`` block, the files of all ranks are put into
    one folder, and the checkpoint is committed. If a rank fails in the block, nothing is
    committed. If the files cannot be stored, rank 0 logs a warning, training goes on, and earlier checkpoints stay.

    Args:
        step: the step of the training.

    Raises:
        ConfigurationError: the run has no ``checkpoints=``, the ranks do not call this and the other checkpoint
            functions in the same order, ``step`` is not a whole number of at least 0, two ranks wrote different files
            with the same name, this rank wrote a file whose name the package itself uses or a link that leads nowhere,
            or several ranks outside a run have not called ``init_process_group``.
        RuntimeError: another rank has failed in the ``with`` block; that rank's exception says why.

    Example:
        >>> with checkpoint_folder(step=100) as folder:  # doctest: +SKIP
        ...     torch.save(model.state_dict(), folder / f"model-{rank()}.pt")
    """
    from distributor.checkpoint.folder import checkpoint_folder as write

    with reports.spending("saving"), write(step) as folder:
        yield folder


def latest_checkpoint() -> Checkpoint | None:
    """Return the last committed checkpoint that still has all its files; ``None`` if there is none.

    Any rank may call this function, without waiting for others. At the beginning of an attempt, all ranks get the same
    checkpoint. If ``checkpoints=`` is a URL, the checkpoint's files are downloaded. If newer checkpoints are skipped, a
    warning on the driver says which, and why.

    Returns:
        A checkpoint with the attributes ``step``, ``path`` (the folder with its files, which must not be changed) and
        ``metrics``.

    Raises:
        ConfigurationError: the run has no ``checkpoints=``.
        OSError: the folder or URL of checkpoints cannot be read, the checkpoint was removed during the run, or no
            checkpoint can be loaded, but some may be whole.

    Example:
        >>> if (last := latest_checkpoint()) is not None:  # doctest: +SKIP
        ...     model.load_state_dict(torch.load(last.path / f"model-{rank()}.pt"))
    """
    from distributor.checkpoint.loading import latest_checkpoint as latest

    return latest()


def best_checkpoint() -> Checkpoint | None:
    """Return the committed checkpoint with the best value of the metric in ``Checkpoints(best=...)``.

    If no checkpoint has a value of the metric that ``Checkpoints(best=...)`` names, return ``None``. In all other
    respects, this function is like ``latest_checkpoint``.
    """
    from distributor.checkpoint.loading import best_checkpoint as best

    return best()


def suggest_checkpoint_interval(failures_per_day: float, save_seconds: float) -> float:
    """Return the number of seconds between saves that minimizes the time lost to failures and saves.

    With M seconds between failures and C seconds per save, the interval is
    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C, or M if C is at least 2 M.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006), equation 37. The formula's first factor, the square root, is an earlier and
    simpler estimate of the interval by J. W. Young (1974).

    Args:
        failures_per_day: number of failures of the whole run per day (the failures of one node, times the number of
            nodes).
        save_seconds: number of seconds for which a save holds up training.

    Raises:
        ConfigurationError: an argument is not a number greater than 0.

    Example:
        >>> round(suggest_checkpoint_interval(failures_per_day=2, save_seconds=5))
        654
    """
    from distributor.checkpoint.interval import suggest_checkpoint_interval as suggest

    return suggest(failures_per_day, save_seconds)


def rank0_first() -> AbstractContextManager[None]:
    """Let rank 0 run a block before all other ranks, for example to download data to a shared disk.

    All ranks must enter the ``with`` block. They wait for each other without a time limit, but need the default process
    group. If rank 0 fails in the block, no other rank enters it.

    Raises:
        ConfigurationError: there are several ranks, and ``init_process_group`` has not been called.
        RuntimeError: rank 0 has failed in the ``with`` block; rank 0's exception says why.

    Example:
        >>> with rank0_first():
        ...     pass  # data = load(download=True)
    """
    return _first("rank0_first", rank() == 0)


def local_rank0_first() -> AbstractContextManager[None]:
    """Let local rank 0 of each node run a block first. No other rank runs it before every local rank 0 has finished.

    Use this function, for example, to download data to each node's disk. If several executors share a machine, each of
    them has a local rank 0, unless ``local_ranks="host"``. All ranks must enter the ``with`` block. If local rank 0 of
    any node fails in the block, no other rank of any node enters it.

    Raises:
        ConfigurationError, RuntimeError: as in :func:`rank0_first`.

    Example:
        >>> with local_rank0_first():
        ...     pass  # build(extension)
    """
    return _first("local_rank0_first", local_rank() == 0)


@contextmanager
def _first(name: str, goes_first: bool) -> Iterator[None]:
    if world_size() == 1:
        yield
        return
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigurationError(
            f"{name} makes {world_size()} ranks wait for each other: call torch.distributed.init_process_group() first"
        )
    turn = str(next(_turns))
    if goes_first:
        exchange = _connected(dist, name)
        try:
            yield
        except BaseException:
            why = f"rank {rank()}, which went first, has failed in the with block; the exception raised there says why"
            exchange.fail(turn, f"{name}: {why}")
            raise
    if (text := _failed(dist, name, turn)) is not None:
        raise RuntimeError(text)
    if not goes_first:
        yield


#: The process that has connected to the other ranks for :func:`rank0_first`, and the connection.
_connection: tuple[int, Exchange] | None = None
_turns = itertools.count()


def _connected(dist: Any, name: str) -> Exchange:
    """Return the connection to the other ranks of the default process group. All ranks make the first call together.

    Collectives would not do: they need a tensor on a device of the group, and NCCL's take ten minutes at most.
    """
    global _connection
    if _connection is None or _connection[0] != os.getpid():
        from distributor.checkpoint.context import in_run
        from distributor.checkpoint.exchange import connect, connect_group

        rank, size = dist.get_rank(), dist.get_world_size()
        if in_run(os.environ) and size == world_size():
            exchange = connect(rank, size, f"{attempt()}/first", name)
        else:
            exchange, _ = connect_group(rank, size, secrets.token_hex(6), name)
        _connection = os.getpid(), exchange
    return _connection[1]


def _failed(dist: Any, name: str = "rank0_first", turn: str = "0") -> str | None:
    """Wait for all ranks. Return the text of the error if a rank has failed in the ``with`` block, else ``None``."""
    try:
        exchange = _connected(dist, name)
        exchange.gather(f"{turn}/first", b"", name, patient=True)
        exchange.share(f"{turn}/first", [b""], name, patient=True)
    except dist.DistError as error:  # the store ends with the node of a rank that has failed
        lost = "the connection to the other ranks has broken, so one has failed in the call"
        return f"{name}: {lost}; the exception raised there says why ({error})"
    except RuntimeError as error:
        return str(error)
    return None


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"the environment variable {name} must be a whole number, not {text!r}") from None


def dataset(name: str) -> RankDataset:
    """Return a table of ``Distributor(data=...)``, for ``dataset(name).loader(batch_size=...)``.

    Raises:
        ConfigurationError: the run has no data of this name, or this process is no rank of a run.
        OSError: this node does not see the folder with the data.

    Example:
        >>> for batch in dataset("train").loader(batch_size=64, shuffle=True):  # doctest: +SKIP
        ...     loss = loss_function(model(batch["x"]), batch["y"])
    """
    from distributor.values.dataset import from_environ

    found = from_environ(os.environ)
    if name not in found:
        has = f"this run has {', '.join(map(repr, found))}" if found else "this process has none"
        raise ConfigurationError(f"there is no data {name!r}: {has}. Pass Distributor(data={{{name!r}: Data(df)}})")
    from distributor.data.loader import RankDataset

    return RankDataset.open(found[name], rank(), world_size())


def deepspeed_config() -> dict[str, Any]:
    """Return this run's final DeepSpeed configuration, for ``deepspeed.initialize(config=...)``.

    Each call returns a new copy of the configuration.

    Raises:
        ConfigurationError: this process is not a rank of a run with a ``deepspeedConfig``, or the configuration still
            contains an "auto" that only Hugging Face's Trainer or Accelerate's ``DummyScheduler`` can replace.

    Example:
        >>> deepspeed_config()["zero_optimization"]["stage"]  # doctest: +SKIP
        3
    """
    path = os.environ.get(CONFIG_PATH)
    if path is None and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigurationError(
            "this run has no DeepSpeed configuration: start it with DeepspeedTorchDistributor(deepspeedConfig=...)"
        )
    if path is None:
        raise ConfigurationError(
            "this process has no DeepSpeed configuration: call deepspeed_config() in a rank of "
            "DeepspeedTorchDistributor(deepspeedConfig=...)"
        )
    from distributor.launch.deepspeed.config import unfilled

    with open(path, encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    if left := unfilled(config):
        raise ConfigurationError(
            f"deepspeedConfig: {left[0]} is 'auto', and only Hugging Face's Trainer or Accelerate's DummyScheduler can "
            "replace it: replace 'auto' with the number of training steps, or pass this number in the argument "
            "auto={'total_steps': ...}"
        )
    return config
