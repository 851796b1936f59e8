"""Turn calls such as Azure's ``run`` into runs of ``Distributor``, on the GPUs that are available."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from distributor.api.distributor import Distributor
from distributor.compat.accelerators import OnAccelerator
from distributor.compat.places import Place, look
from distributor.compat.trial import VARIABLE, cpu_ranks
from distributor.errors import ConfigurationError, ResourceError
from distributor.launch.torchrun import Torchrun
from distributor.run.handle import Run
from distributor.text import notices
from distributor.text.wording import count
from distributor.values.checks import check_choice
from distributor.values.launch_path import Launch


@dataclass(frozen=True)
class Request:
    """What a call of another product's function, such as Azure's ``run``, asks for."""

    asked: str  # the call in the user's words, such as "@distributed(gpus=8)"
    parameter: str  # of the call: sets the number of processes
    processes: int | None = None  # None: one for each GPU
    local_mode: bool | None = None
    otherwise: str = "leave out local_mode=False to train on this machine"  # advice if no Spark session is active
    use_gpu: bool | None = None  # None: if there are any
    accelerator: str | None = None  # the type of GPUs; None: any
    per_node: int | None = None  # at most so many ranks on one executor
    launch: Launch = field(default_factory=Torchrun)
    options: Mapping[str, Any] = field(default_factory=dict)  # further ones of Distributor


def with_options(request: Request, options: Mapping[str, Any] | None) -> Request:
    """Return a request with options of ``Distributor`` that the user gives. They override the request's own,
    of environment variables each by itself.

    They cannot be what the call sets: ``num_processes``, ``launch``, and ``local_mode`` or ``use_gpu`` where it does.

    >>> with_options(Request("run()", "instance_count"), {"use_gpu": False, "log_dir": "logs"}).use_gpu
    False
    """
    others = dict(options or {})
    for name, advice in (("num_processes", f", and pass {request.parameter}= instead"), ("launch", "")):
        if name in others:
            raise ConfigurationError(
                f"options={{{name!r}: {others[name]!r}}} cannot be used, since {request.asked} itself sets {name}: "
                f"leave it out{advice}"
            )
    if isinstance(others.get("env"), Mapping):
        others["env"] = {**request.options.get("env", {}), **others["env"]}
    chosen: dict[str, Any] = {name: others.pop(name) for name in ("local_mode", "use_gpu") if name in others}
    for name, value in chosen.items():
        if (present := getattr(request, name)) is not None:
            raise ConfigurationError(
                f"{name}={present!r} and options={{{name!r}: {value!r}}} both set {name}: leave it out of options"
            )
        chosen[name] = check_choice(name, value)
    return replace(request, options={**request.options, **others}, **chosen)


@dataclass(frozen=True)
class Settled:
    """The arguments of ``Distributor`` for a run that does what a :class:`Request` asks for."""

    processes: int
    local_mode: bool | None
    use_gpu: bool
    launch: Launch
    options: Mapping[str, Any]


def settle(request: Request, trial: int | None, look: Callable[[bool | None], Place]) -> Settled:
    """Return the arguments of ``Distributor`` for a request; ``trial`` is a number of ranks on CPUs that overrides it.

    Whether executors have enough GPUs is not checked here.

    >>> settle(Request("run()", "gpus"), None, lambda mode: Place(gpus=4)).processes
    4
    >>> settle(Request("run()", "gpus", 8, use_gpu=True, accelerator="H100"), 2, look).use_gpu
    False
    """
    if trial is not None:
        here = True if request.local_mode else None  # None: on executors, if there are any
        return Settled(trial, here, False, request.launch, request.options)
    place = look(request.local_mode)
    if not place.exists:
        raise ConfigurationError(
            f"{request.asked} trains on the executors of a Spark session, and none is active: create one first "
            f"(SparkSession.builder.getOrCreate()), or {request.otherwise}"
        )
    use_gpu = place.gpus != 0 if request.use_gpu is None else request.use_gpu
    processes = _all_gpus(request, place) if request.processes is None else request.processes
    if use_gpu and place.executors and place.gpus == 0:
        raise ResourceError(
            f"{request.asked} needs {count(processes, 'GPU')}, but executors have none: set "
            "spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount when the session starts"
        )
    if use_gpu and not place.executors and processes > (place.gpus or 0):
        raise ResourceError(
            f"{request.asked} needs {count(processes, 'GPU')}, but this machine has {place.gpus}: ask for fewer, or "
            "train on the executors of a Spark session"
        )
    checked = request.accelerator is not None and use_gpu
    limit = {"max_processes_per_node": request.per_node} if place.executors and request.per_node else {}
    return Settled(
        processes,
        request.local_mode,
        use_gpu,
        OnAccelerator(str(request.accelerator), request.launch) if checked else request.launch,
        {**limit, **request.options},
    )


def _all_gpus(request: Request, place: Place) -> int:
    where = "the executors" if place.executors else "this machine"
    if place.gpus is None:
        raise ConfigurationError(
            f"{request.asked} takes all GPUs of {where}, but their number is not known (no executor is up yet, or this "
            f"is a Spark Connect session): pass {request.parameter}="
        )
    if place.gpus == 0:
        raise ResourceError(
            f"{request.asked} takes all GPUs of {where}, but there are none: start a Spark session whose executors "
            "have GPUs, or use a machine that has GPUs"
        )
    return place.gpus


class EveryRank(Distributor):
    """A distributor whose run can also return the values of all ranks."""

    def run_all(self, train_object: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Train, and return every rank's value in rank order."""
        values: list[Any] = self._wait(*self._prepare(train_object, args, kwargs, "all"), Run.results)
        return values


def run_first(request: Request, target: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Train as requested, and return rank 0's value."""
    with _told_how_to_try(request):
        return _distributor(request).run(target, *args, **(kwargs or {}))


def run_all(
    request: Request, target: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Any]:
    """Train as requested, and return every rank's value, in rank order."""
    with _told_how_to_try(request):
        return _distributor(request).run_all(target, *args, **(kwargs or {}))


def _distributor(request: Request) -> EveryRank:
    trial = cpu_ranks(os.environ)
    settled = settle(request, trial, lambda mode: look(mode, os.environ))
    if trial is not None:
        check_trial(request, trial)
        notices.logger.warning(
            "%s=%d: %s on CPUs %s, whatever %s asks for; GPU types are not checked. To train as asked, unset %s",
            VARIABLE,
            trial,
            count(trial, "rank"),
            "trains" if trial == 1 else "train",
            request.asked,
            VARIABLE,
        )
    return EveryRank(settled.processes, settled.local_mode, settled.use_gpu, launch=settled.launch, **settled.options)


def check_trial(request: Request, trial: int) -> None:
    """ConfigurationError if the launch path of a request cannot start ``trial`` ranks, as for TensorFlow's servers.

    >>> check_trial(Request("run()", "gpus"), 2)
    """
    try:
        request.launch.resolve(trial, False)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{VARIABLE}={trial} sets a number of processes that this call cannot use: {error}"
        ) from None


@contextmanager
def _told_how_to_try(request: Request) -> Iterator[None]:
    """Add to each error about missing GPUs how to try the same call on CPUs."""
    try:
        yield
    except ResourceError as error:
        if request.use_gpu is False or "GPU" not in str(error):
            raise
        raise ResourceError(f"{error}. To try this on CPUs, set {VARIABLE}=2") from None
