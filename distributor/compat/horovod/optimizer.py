"""``DistributedOptimizer``: an optimizer that averages gradients over all ranks before it steps.

The reduction of a complete gradient begins while ``backward`` still computes other gradients. Collectives must start in
the same order on all ranks, so all ranks start the reductions from the last parameter to the first.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex, cast

import torch

from distributor.compat.horovod import collectives, world
from distributor.compat.horovod.collectives import Average, Handle, Op, Reduction, check_op, no_process_set
from distributor.compat.horovod.compression import Compression, Compressor
from distributor.errors import ConfigurationError
from distributor.values.checks import check_count

Parameter = torch.Tensor


class GradientReducer:
    """Starts the reduction of each gradient over the ranks. The order is the same on all ranks: last parameter first.

    The reduction of a parameter's gradient starts once this gradient and the gradients of all later parameters in the
    optimizer's groups have been computed.

    Args:
        optimizer: the optimizer whose gradients are reduced.
        passes: number of backward passes whose gradients are summed before they are reduced.
        reduction: how the gradients of all ranks are combined.
        dense: whether to convert sparse gradients to dense ones.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, passes: int, reduction: Reduction, *, dense: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._passes = passes
        self._reduction = reduction
        self._dense = dense
        self._arrived: Counter[Parameter] = Counter()
        self._handles: dict[Parameter, Handle] = {}
        self._next = 0

    @property
    def under_way(self) -> bool:
        """Whether a reduction has been started, and :meth:`finish` has not yet waited for its result."""
        return bool(self._handles)

    def watch(self) -> None:
        """Make torch call :meth:`arrived` for each gradient that it has computed."""
        for parameter in self._order():
            if parameter.requires_grad:
                cast(Any, parameter).register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, parameter: Parameter) -> None:
        """Count a computed gradient of a parameter, and start the reductions that need not wait for other gradients.

        Raises:
            ConfigurationError: there were more backward passes before a step than ``backward_passes_per_step``, or a
                gradient is sparse and ``dense`` is ``False``.
        """
        self._arrived[parameter] += 1
        if self._arrived[parameter] > self._passes:
            raise ConfigurationError(
                f"there were more than backward_passes_per_step={self._passes} backward passes before step(): raise "
                "that number, or call step() or synchronize() in between"
            )
        order = self._order()
        while self._next < len(order):
            following = order[self._next]
            if following.requires_grad:
                if self._arrived[following] < self._passes:
                    return
                self._start(following)
            self._next += 1

    def finish(self) -> None:
        """Start the remaining reductions, wait for all, and reset the counts of computed gradients for the next step.

        A parameter without a gradient gets a gradient of zeros. Other ranks may have a gradient for this parameter, and
        all ranks must take part in the reduction of each gradient.
        """
        for parameter in self._order()[self._next :]:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._start(parameter)
        for handle in self._handles.values():
            handle.wait()
        self._handles.clear()
        self.restart()

    def restart(self) -> None:
        """Count computed gradients from zero again, as at the beginning of a step."""
        self._arrived.clear()
        self._next = 0

    def _start(self, parameter: Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            if not self._dense:
                raise ConfigurationError(
                    "a gradient is sparse, but only dense ones can be reduced: pass sparse_as_dense=True, or use "
                    "layers with sparse=False"
                )
            gradient = parameter.grad = gradient.to_dense()
        self._handles[parameter] = collectives.start(gradient, self._reduction, into=gradient)

    def _order(self) -> list[Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]][::-1]


class Distributed(torch.optim.Optimizer):
    """The methods that :func:`DistributedOptimizer` adds to the class of the user's optimizer."""

    _original: torch.optim.Optimizer
    _reducer: GradientReducer
    _reduced = False
    _skips = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters with their options: those of the user's optimizer, even if it replaces them."""
        return self._original.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._original.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """What the optimizer keeps for each parameter, such as momenta: the state of the user's optimizer."""
        return self._original.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._original.state = state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # ``load_state_dict`` ends with this call, which would write groups and state past the properties.
        self._original.__setstate__(state)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # ``copy`` and ``pickle`` call this. They cannot copy reductions that are under way, nor import this class.
        return copy.copy, (self._original,)

    def synchronize(self) -> None:
        """Reduce all gradients over the ranks now; the next :meth:`step` does not reduce them again."""
        self._reducer.finish()
        self._reduced = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let :meth:`step` in the ``with`` block update the parameters without calling :meth:`synchronize`.

        Call :meth:`synchronize` before the ``with`` block. Without this call, reductions that ``backward`` has started
        may still be changing the gradients.
        """
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Any = None) -> Any:
        """Reduce the gradients over the ranks, unless :meth:`synchronize` has done so, and update the parameters.

        Raises:
            ConfigurationError: a closure is given, whose gradients would not be reduced.
        """
        if closure is not None:
            raise ConfigurationError(
                "step(closure) computes gradients that are not reduced over ranks: compute them first, then call step()"
            )
        if not (self._skips or self._reduced):
            self.synchronize()
        self._reduced = False
        cast(Any, self._original)._opt_called = True  # its schedulers warn if it is not set: torch sets it in ``step``
        return super().step()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients of all parameters, and the number of backward passes since the last :meth:`step`.

        Raises:
            ConfigurationError: the gradients are being reduced, and would be lost.
        """
        if self._reducer.under_way:
            raise ConfigurationError(
                "zero_grad() loses the gradients of the last backward(), which are being reduced: call step() or "
                "synchronize() first"
            )
        self._reducer.restart()
        self._reduced = False
        super().zero_grad(*args, **kwargs)


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op | None = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """Return an optimizer like ``optimizer`` that also averages the gradients of all ranks before it steps.

    The new optimizer shares parameters, options and state with ``optimizer``. So you can make learning-rate schedulers
    for either optimizer, and load a state into either (``load_state_dict``, ``broadcast_optimizer_state``).

    A copy of the new optimizer (``copy``, ``pickle``, ``torch.save``) is an ordinary optimizer of the class of
    ``optimizer``, whose ``step`` averages nothing. To train with a deep copy or with an optimizer loaded from a file,
    pass it to ``DistributedOptimizer``.

    Args:
        optimizer: any optimizer of torch.
        named_parameters: ``model.named_parameters()``, used only to check that each parameter of the optimizer has a
            name.
        compression: how gradients are compressed for sending.
        backward_passes_per_step: number of backward passes before each ``step()``; their gradients are summed, not
            averaged.
        op: how gradients are combined: ``Average`` (default, also for ``None``) or ``Sum``.
        gradient_predivide_factor: factor by which gradients are divided before the sum and multiplied after it.
        num_groups, groups: accepted without effect, since they only change how Horovod packs messages.
        sparse_as_dense: whether to convert sparse gradients to dense ones; otherwise they cause an error.
        process_set: must be ``None``, since sets of only some ranks are not supported.

    Raises:
        ConfigurationError: an argument is wrong, or ``init`` was not called.

    Example:
        >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))  # doctest: +SKIP
    """
    world.require("DistributedOptimizer")
    no_process_set(process_set)
    operation = check_op(op)
    if operation not in (Op.AVERAGE, Op.SUM):
        raise ConfigurationError(f"op must be hvd.Average or hvd.Sum for gradients, not hvd.{operation.value}")
    if named_parameters is not None:
        _check_names(optimizer, list(named_parameters))
    factor = gradient_predivide_factor
    reducer = GradientReducer(
        optimizer,
        check_count("backward_passes_per_step", backward_passes_per_step),
        Reduction(operation, 1 / factor, factor, compression),
        dense=sparse_as_dense,
    )
    kind: Any = type(type(optimizer).__name__, (Distributed, type(optimizer)), {})
    made = cast(Distributed, kind.__new__(kind))
    # ``step`` is not copied: if a learning-rate scheduler has replaced it on ``optimizer``, the copy would hide
    # ``Distributed.step``, which reduces the gradients. Properties of ``Distributed`` take the place of the others.
    left_out = ("step", "param_groups", "state")
    vars(made).update({name: value for name, value in vars(optimizer).items() if name not in left_out})
    made._original, made._reducer = optimizer, reducer
    reducer.watch()
    return made


def _check_names(optimizer: torch.optim.Optimizer, named: Sequence[Any]) -> None:
    """Check that each parameter of an optimizer has a name of its own.

    Raises:
        ConfigurationError: several parameters have the same name, a parameter has no name, or ``named`` does not
            consist of pairs.
    """
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ConfigurationError("named_parameters must be model.named_parameters(): pairs of a name and a parameter")
    names = Counter(name for name, _ in named)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigurationError(f"named_parameters has {twice[0]!r} more than once: give each parameter its own name")
    known = {id(parameter) for _, parameter in named}
    missing = sum(id(each) not in known for group in optimizer.param_groups for each in group["params"])
    if missing:
        raise ConfigurationError(
            f"named_parameters lacks {missing} of the optimizer's parameters: pass the named parameters of all models, "
            "or leave out named_parameters"
        )
