"""``horovod.spark.run``, which also serves as ``horovod.run``.

Sources: https://horovod.readthedocs.io/en/stable/spark_include.html,
https://horovod.readthedocs.io/en/stable/run_include.html
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from distributor.compat.running import Request, run_all, with_options
from distributor.errors import ConfigurationError
from distributor.text import notices
from distributor.values.checks import check_count

T = TypeVar("T")

#: What to use instead of each name of ``horovod.spark`` that is not supported.
INSTEAD = {
    "run_elastic": "run() with a fixed num_proc and checkpoints, or distributor.Distributor((least, most), "
    "max_restarts=...), whose number of ranks may change",
    "TorchEstimator": "run() with a function that reads its data from files",
    "KerasEstimator": 'distributor.Distributor(n, launch="tensorflow")',
}


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Run a function in many ranks, and return their values in rank order.

    Args:
        fn, args, kwargs: the function and its arguments.
        num_proc: number of ranks. ``None`` (default): one for each GPU, or for each task slot if there are no GPUs.
        start_timeout: number of seconds within which all ranks must be up (default 600).
        use_mpi, use_gloo: accepted without effect, since ranks always communicate through ``torch.distributed``;
            ``use_mpi=True`` logs a warning.
        stdout, stderr: may only be ``sys.stdout`` and ``sys.stderr``, where the output of ranks is shown anyway.
        extra_mpi_args, executable, hosts, hostfile: refused; the error says what to do instead.
        env: additional environment variables for the ranks.
        verbose: 0 hides the status of the run; any other number shows it.
        nics: names of the network interfaces that gloo and NCCL use. By default, the kernel's routing chooses them.
        prefix_output_with_timestamp: accepted without effect, with a warning, since lines of output begin with rank and
            host.
        np: the same as ``num_proc``, under the name that it has in ``horovod.run``.
        options: further options of ``Distributor`` by name, such as ``{"log_dir": "logs"}``. ``{"use_gpu": False}``
            trains without GPUs, and ``{"local_mode": True}`` on this machine. They cannot include ``num_processes`` or
            ``launch``, which ``run`` itself sets.

    Raises:
        ConfigurationError: an argument is wrong; nothing was started.
        TrainingError: a rank failed.

    Example:
        >>> run(train, args=(1e-3,), num_proc=4)  # doctest: +SKIP
        [0.1, 0.1, 0.1, 0.1]
    """
    refuse(extra_mpi_args=extra_mpi_args, executable=executable, hosts=hosts, hostfile=hostfile)
    refuse(
        stdout=None if stdout is sys.stdout else stdout,
        stderr=None if stderr is sys.stderr else stderr,
    )
    num_proc = one_number(num_proc, np)
    if use_mpi:
        notices.logger.warning("use_mpi=True does not start MPI: ranks communicate through torch.distributed")
    if prefix_output_with_timestamp:
        notices.logger.warning("prefix_output_with_timestamp is not used: lines begin with rank and host")
    request = Request(
        asked="run()" if num_proc is None else f"run(num_proc={num_proc!r})",
        parameter="num_proc",
        processes=None if num_proc is None else check_count("num_proc", num_proc),
        options=_named(start_timeout, {**(env or {}), **interfaces(nics)}, verbose),
    )
    return run_all(with_options(request, options), fn, args, kwargs)


def _named(start_timeout: float | None, variables: Mapping[str, str], verbose: int) -> dict[str, Any]:
    """Return arguments of ``run`` as options of ``Distributor``, which have other names."""
    return {
        **({"start_timeout": start_timeout} if start_timeout is not None else {}),
        **({"env": variables} if variables else {}),
        **({"progress": False} if verbose == 0 else {}),
    }


def one_number(num_proc: int | None, np: int | None) -> int | None:
    """Return the number of ranks, which may be given as ``num_proc`` or as ``np``.

    Raises:
        ConfigurationError: both are given, with different values.

    Example:
        >>> one_number(None, 4)
        4
    """
    if num_proc is not None and np is not None and num_proc != np:
        raise ConfigurationError(f"num_proc={num_proc!r} and np={np!r} both give the number of ranks: leave np out")
    return np if num_proc is None else num_proc


#: Arguments of Horovod that would change how ranks start or write, and what to do instead.
_REFUSED = {
    "extra_mpi_args": "MPI does not start the ranks. Leave this argument out; set variables of NCCL or gloo with env=",
    "stdout": 'lines of ranks are shown with rank and host: pass options={"log_dir": "logs"} to keep them in files',
    "stderr": 'lines of ranks are shown with rank and host: pass options={"log_dir": "logs"} to keep them in files',
    "hosts": "ranks train on the executors or, without a Spark session, on this machine. Leave this argument out",
    "hostfile": "ranks train on the executors or, without a Spark session, on this machine. Leave this argument out",
    "executable": "ranks run with the Python of their executor: set spark.pyspark.python, or PYSPARK_PYTHON",
}


def refuse(**given: Any) -> None:
    """Check that none of these arguments has a value. ``run`` has them only because Horovod's function has them.

    Raises:
        ConfigurationError: an argument is given that ``run`` does not support; the error says what to do instead.
    """
    for name, value in given.items():
        if value:
            raise ConfigurationError(f"{name}={value!r} cannot be used: {_REFUSED[name]}")


def interfaces(nics: Iterable[str] | str | None) -> dict[str, str]:
    """Return the environment variables that make ranks use the given network interfaces.

    Example:
        >>> interfaces({"eth1"})
        {'GLOO_SOCKET_IFNAME': 'eth1', 'NCCL_SOCKET_IFNAME': '=eth1'}
    """
    if not nics:
        return {}
    names = ",".join([nics] if isinstance(nics, str) else sorted(nics))
    return {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": f"={names}"}


def __getattr__(name: str) -> Any:
    if name not in INSTEAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ConfigurationError(f"horovod.spark.{name} is not supported: use {INSTEAD[name]}")
