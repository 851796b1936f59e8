"""All options of a run: the groups of ``values/options.py``, and the options that only the driver needs."""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_type_hints

from distributor.data.source import Data, as_data
from distributor.errors import ConfigurationError
from distributor.launch import registry
from distributor.values.checks import check_choice, check_title, optional
from distributor.values.launch_path import Launch
from distributor.values.options import (
    WHAT,
    Deadlines,
    Flag,
    Group,
    Network,
    Option,
    Output,
    Project,
    Recovery,
    Resources,
    Startup,
    Training,
    Variables,
    declared,
    option,
)


def check_launch(name: str, launch: Any) -> Launch:
    """Return the launch path that the user asks for, by its name or as an object with a method ``resolve``."""
    if isinstance(launch, str) and launch in registry.PATHS:
        return registry.by_name(launch)
    if isinstance(launch, str) or not callable(getattr(launch, "resolve", None)) or isinstance(launch, type):
        raise ConfigurationError(
            f"{name} must be {' or '.join(map(repr, registry.PATHS))} or a launch path such as "
            f"distributor.launch.DeepSpeed(config), not {launch!r}"
        )
    valid: Launch = launch
    return valid


#: The methods of a callback that a run calls.
_MOMENTS = ("on_start", "on_metrics", "on_checkpoint", "on_attempt_end", "on_end", "on_close", "on_study_end")


def check_callbacks(name: str, callbacks: Any) -> tuple[Any, ...]:
    """Return the callbacks as a tuple. Each must have at least one of the methods that a run calls."""
    if isinstance(callbacks, (str, bytes)) or not isinstance(callbacks, Iterable):
        raise ConfigurationError(f"{name} must be a list of objects with methods such as on_metrics, not {callbacks!r}")
    checked = tuple(callbacks)
    for callback in checked:
        if isinstance(callback, type) or not any(callable(getattr(callback, moment, None)) for moment in _MOMENTS):
            raise ConfigurationError(
                f"{name}: {callback!r} is not an object with any of the methods {', '.join(_MOMENTS)}"
            )
    return checked


def check_data(name: str, data: Any) -> Mapping[str, Data]:
    """Return the tables for the ranks by name, each as :class:`Data`."""
    if data is None:
        return {}
    if not isinstance(data, Mapping) or any(not isinstance(key, str) or not key.isidentifier() for key in data):
        raise ConfigurationError(f"{name} must be a dict such as {{'train': Data(df)}}, not {reprlib.repr(data)}")
    return {key: as_data(value) for key, value in data.items()}


@dataclass(frozen=True)
class Request(Group):
    """Where and how a run trains, and its name.

    Attributes:
        local_mode: whether to train on this machine. ``None`` trains on Spark if the active session is on a cluster,
            otherwise on this machine.
        launch: how the user wants ranks to be started. The method ``resolve`` of this object returns the launch path of
            a run.
        name: the user's name for the run, if it has one.
        callbacks: objects with methods that are called on the driver during the run.
        data: tables for the ranks, by name.
    """

    local_mode: bool | None = option(None, check_choice, "Train on this machine, without Spark.")
    launch: Launch = option(
        "torchrun",
        check_launch,
        "How ranks are launched; deepspeed is for a script with a DeepSpeed configuration of its own.",
        Flag(panel=WHAT, kind=tuple(registry.PATHS)),
    )
    name: str | None = option(
        None, optional(check_title), "Name of the run, for the status and the Spark UI.", Flag(panel=WHAT)
    )
    callbacks: tuple[Any, ...] = option((), check_callbacks, "Objects with methods to call on the driver.")
    data: Mapping[str, Data] = option(None, check_data, "Tables for the ranks, by name.")


@dataclass(frozen=True)
class Options:
    """The options of a run, checked."""

    request: Request
    project: Project
    resources: Resources
    variables: Variables
    deadlines: Deadlines
    output: Output
    network: Network
    startup: Startup
    training: Training
    recovery: Recovery

    def __post_init__(self) -> None:
        if self.training.local_ranks == "host" and self.resources.use_gpu:
            raise ConfigurationError(
                "local_ranks='host' is for ranks on CPUs: with GPUs, LOCAL_RANK names a device of the rank's executor. "
                "Pass use_gpu=False, or start one executor per host"
            )
        self._check_resume()
        count = self.resources.num_processes
        for rank in self.output.log_ranks or ():
            if not 0 <= rank < count:
                raise ConfigurationError(
                    f"the option 'logs' contains rank {rank!r}, but with num_processes={count}, ranks go from 0 to "
                    f"{count - 1}"
                )

    def _check_resume(self) -> None:
        resume = self.recovery.resume
        given = {"name": self.request.name, "checkpoints": self.project.checkpoints}
        missing = [f"{option}=" for option, value in given.items() if value is None]
        if resume is not None and missing:
            raise ConfigurationError(
                f"resume={resume!r} needs name= and checkpoints=, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not given"
            )

    @classmethod
    def of(cls, **arguments: Any) -> Options:
        """Check each argument, and return the options. An argument that is left out gets its default.

        >>> Options.of(num_processes=4, grace_period=60).deadlines.grace_period
        60.0
        """
        unknown = arguments.keys() - OPTIONS.keys()
        if unknown:
            raise TypeError(
                f"unknown options: {', '.join(sorted(unknown))}. Declare each in values/options.py or api/parameters.py"
            )
        groups: dict[str, Any] = {
            group: kind(**{name: arguments[name] for name in declared(kind) if name in arguments})
            for group, kind in GROUPS.items()
        }
        return cls(**groups)


Init = TypeVar("Init", bound=Callable[..., None])


def suggests_names(init: Init) -> Init:
    """Decorate a constructor: its error for an unknown option names the option that was probably meant."""
    parameters = inspect.signature(init).parameters.values()
    names = [parameter.name for parameter in parameters]
    others = [*OPTIONS] if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) else []

    @functools.wraps(init)
    def checked(self: object, /, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names and name not in others:
                close = difflib.get_close_matches(name, names, 1, 0.8) or difflib.get_close_matches(name, others, 1)
                close = close or difflib.get_close_matches(name, names, 1)
                hint = f": did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"there is no option {name!r}{hint}")
        init(self, *args, **kwargs)

    return cast(Init, checked)


GROUPS: dict[str, type[Group]] = get_type_hints(Options)

OPTIONS: dict[str, Option] = {
    name: declaration for kind in GROUPS.values() for name, declaration in declared(kind).items()
}
