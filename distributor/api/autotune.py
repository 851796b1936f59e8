"""Autotuning: try DeepSpeed configurations in short runs, one after the other, and report the best.

DeepSpeed's own autotuner cannot be used on a Spark cluster, because it starts its experiments through ssh.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from distributor.api.deepspeed import DeepspeedTorchDistributor
from distributor.errors import ConfigurationError, PayloadError, ResourceError, StartError, TrainingError
from distributor.launch.deepspeed import reading
from distributor.launch.deepspeed.reading import Config
from distributor.run.handle import Run
from distributor.text.tables import table
from distributor.values.checks import check_seconds, one_of, optional

#: Metrics for which smaller values are better.
_LESS = ("latency", "loss", "memory", "seconds", "time")

#: Error texts of torch, DeepSpeed, Python and this package for a rank that is out of memory.
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "MemoryError",
    "for lack of memory",
)


@dataclass(frozen=True)
class Experiment:
    """One configuration that was tried, and its outcome.

    Attributes:
        values: a mapping from the path of each setting, such as ``"zero_optimization.stage"``, to the value that was
            tried.
        state: ``"finished"``, ``"out of memory"``, ``"too slow"`` (it took longer than ``timeout``), ``"refused"`` (the
            configuration is wrong) or ``"failed"``.
        metric: the value that the training function measured; ``None`` unless the experiment finished.
        seconds: duration of the whole run.
        reason: the first line of the error message, or that the experiment took too long; empty if it finished.
        config: the configuration with ``values`` set. Its "auto" settings are kept, so that the configuration suits
            any number of ranks.
    """

    values: Mapping[str, Any]
    state: Literal["finished", "out of memory", "too slow", "refused", "failed"]
    metric: float | None = None
    seconds: float = 0.0
    reason: str = ""
    config: Config = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Tuning:
    """The result of :func:`autotune`; ``print`` it for a table.

    Attributes:
        metric: name of the metric that the experiments measured.
        experiments: all experiments with their outcomes, in the order in which they ran.
        best: the experiment with the best metric; ``None`` if no experiment finished with a finite metric.
    """

    metric: str
    experiments: tuple[Experiment, ...]
    best: Experiment | None

    @property
    def best_config(self) -> Config:
        """The best configuration, for ``deepspeedConfig=`` or ``distributor.with_config``.

        Raises:
            TrainingError: no experiment finished with a finite metric.
        """
        if self.best is None:
            raise TrainingError(f"no experiment finished with a finite metric:\n{self}")
        return self.best.config

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for experiment in self.experiments for name in experiment.values))
        rows = [
            [
                str(number),
                *(str(experiment.values.get(name, "")) for name in names),
                "" if experiment.metric is None else f"{experiment.metric:,.4g}",
                f"{experiment.seconds:.1f}",
                experiment.state
                + (" <- best" if experiment is self.best else f": {experiment.reason}" if experiment.reason else ""),
            ]
            for number, experiment in enumerate(self.experiments, start=1)
        ]
        return table(["", *names, self.metric, "seconds", "outcome"], rows)


def autotune(
    fn: Callable[..., Any],
    space: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    metric: str = "throughput",
    *,
    distributor: DeepspeedTorchDistributor | None = None,
    mode: Literal["max", "min"] | None = None,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    on_experiment: Callable[[Experiment], None] | None = None,
) -> Tuning:
    """Train briefly with each configuration of a search space, and compare the configurations by a metric.

    Each experiment is one short run, and becomes a row of the result's table. If an experiment runs out of memory,
    fails, takes too long, or is refused because its configuration is wrong, the row says so, and the next experiment
    starts.

    Args:
        fn: a short training function. It trains a few steps with ``runtime.deepspeed_config()`` and, on rank 0, returns
            the metric as a number, or a mapping that contains the metric.
        space: a mapping from the path of each setting to the values to try
            (``{"zero_optimization.stage": [1, 2, 3]}``); every combination is tried. A list of combinations, each a
            mapping from paths to values, is accepted as well.
        metric: name of the metric: ``"throughput"`` (samples per second), or the name that your function uses.
        distributor: the distributor that runs the experiments. Each experiment changes values in a copy of this
            distributor's configuration. The default is ``DeepspeedTorchDistributor()``, with one process.
        mode: whether the largest (``"max"``) or smallest (``"min"``) value is best. The default is ``"min"`` for
            ``latency``, ``loss``, ``memory``, ``seconds`` and ``time``, and ``"max"`` for all other metrics.
        timeout: number of seconds that one experiment may take, including its start (default: no limit).
        args, kwargs: arguments of ``fn``.
        on_experiment: called with each experiment as it ends, to show progress.

    Raises:
        ConfigurationError: ``space`` or ``mode`` is wrong, ``fn`` cannot be shipped or does not return the metric, or
            there are too few GPUs or slots.
        ResultError, GroupError, PreemptionError: an experiment ended with this error; the others do not run.
        RunCancelledError: an experiment was cancelled from outside; the remaining experiments do not run.
        KeyboardInterrupt: on Ctrl-C. The current experiment is cancelled, but its ranks may not have ended yet.

    Example:
        >>> tuning = autotune(
        ...     train_some_steps,
        ...     {"train_micro_batch_size_per_gpu": [4, 8, 16], "zero_optimization.stage": [1, 2, 3]},
        ...     distributor=DeepspeedTorchDistributor(numGpus=8, deepspeedConfig=zero(2)),
        ... )  # doctest: +SKIP
        >>> print(tuning)  # doctest: +SKIP
        >>> DeepspeedTorchDistributor(numGpus=64, deepspeedConfig=tuning.best_config).run(train)  # doctest: +SKIP
    """
    optional(one_of("max", "min"))("mode", mode)
    optional(partial(check_seconds, least=0))("timeout", timeout)
    less = metric in _LESS if mode is None else mode == "min"
    runner = DeepspeedTorchDistributor() if distributor is None else distributor
    if not hasattr(runner, "with_config"):
        raise ConfigurationError(f"distributor must be a DeepspeedTorchDistributor, not a {type(runner).__name__}")
    base = reading.read(runner.deepspeed_config or {})

    def submit(config: Config) -> Run:
        return runner.with_config(config).submit(fn, *args, **(kwargs or {}))

    experiments = []
    for values in combinations(space):
        experiment = _try(values, merged(base, values), submit, metric, timeout)
        experiments.append(experiment)
        if on_experiment is not None:
            on_experiment(experiment)
    return Tuning(metric, tuple(experiments), best(experiments, less))


def combinations(space: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the combinations of values that a search space describes, each by the paths of the settings.

    >>> combinations({"a": [1, 2], "b.c": [3]})
    [{'a': 1, 'b.c': 3}, {'a': 2, 'b.c': 3}]
    """
    if isinstance(space, Mapping):
        for name, values in space.items():
            if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
                raise ConfigurationError(f"space: {name!r} needs a list of values, not {values!r}")
        combined = [dict(zip(space, values)) for values in itertools.product(*space.values())] if space else []
    else:
        combined = [dict(values) for values in _mappings(space)]
    if not combined:
        raise ConfigurationError(f"space is empty: {space!r}; name at least one setting and the values to try")
    return combined


def _mappings(space: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(space, (str, bytes)) or not isinstance(space, Sequence):
        raise ConfigurationError(f"space must map paths to lists of values, or be a list of mappings, not {space!r}")
    for values in space:
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"space must be a list of mappings, but one item is {values!r}")
        yield values


def merged(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration with ``values`` at their paths.

    >>> merged({"zero_optimization": {"stage": 1}}, {"zero_optimization.stage": 3, "bf16.enabled": True})
    {'zero_optimization': {'stage': 3}, 'bf16': {'enabled': True}}
    """
    result = reading.read(config)
    for path, value in values.items():
        *sections, last = path.split(".")
        place = result
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigurationError(
                    f"space: to set {path!r}, {section!r} must be a mapping in the configuration, but it is {inner!r}"
                )
            place = inner
        place[last] = value
    return reading.read(result)


def best(experiments: Sequence[Experiment], less: bool) -> Experiment | None:
    """Return the first experiment with the largest finite metric, or with the smallest if ``less``."""
    finished = [(it.metric, it) for it in experiments if it.metric is not None and math.isfinite(it.metric)]
    return (min if less else max)(finished, key=lambda pair: pair[0], default=(0.0, None))[1]


def is_out_of_memory(error: TrainingError) -> bool:
    """Return whether any rank ran out of memory, even if the first failure had another reason."""
    failures = [
        f"{failure.kind} {failure.message} {failure.traceback} {failure.log_tail}" for failure in error.failures
    ]
    return any(words in text for words in _OUT_OF_MEMORY for text in (str(error), *failures))


def _try(
    values: Mapping[str, Any], config: Config, submit: Callable[[Config], Run], metric: str, timeout: float | None
) -> Experiment:
    begun = time.monotonic()

    def ended(state: Any, measured: float | None = None, reason: str = "") -> Experiment:
        return Experiment(values, state, measured, time.monotonic() - begun, reason, config)

    run: Run | None = None
    try:
        run = submit(config)
        if not run.wait(timeout):
            run.cancel()
            run.wait()
            return ended("too slow", reason=f"longer than {timeout:g} s")
        value = run.result()
    except (PayloadError, ResourceError):  # not due to the values that are tried
        raise
    except ConfigurationError as error:
        if run is not None:
            raise
        return ended("refused", reason=_first_line(error))
    except (TrainingError, StartError) as error:
        state = "out of memory" if isinstance(error, TrainingError) and is_out_of_memory(error) else "failed"
        return ended(state, reason=_first_line(error))
    except BaseException:  # Ctrl-C
        if run is not None:
            run.cancel("interrupted", say_where=True)
        raise
    return ended("finished", _measured(value, metric))


def _measured(value: Any, metric: str) -> float:
    if isinstance(value, Mapping):
        if metric not in value:
            raise ConfigurationError(
                f"the function must return {metric!r}; rank 0 returned a mapping with {', '.join(map(repr, value))}"
            )
        value = value[metric]
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ConfigurationError(
            f"the function must return {metric!r} from rank 0, as a number or in a mapping; it returned {value!r}"
        )
    return float(value)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
