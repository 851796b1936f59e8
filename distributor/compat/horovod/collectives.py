"""Collectives under Horovod's names, over ``torch.distributed``.

All ranks must call the collectives in the same order. Horovod itself matches the calls of different ranks by ``name``;
here, ``name`` has no effect.

Source: https://horovod.readthedocs.io/en/stable/api.html
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distributor.compat.horovod import world
from distributor.compat.horovod.compression import Compression, Compressor
from distributor.errors import ConfigurationError
from distributor.rank import group


class Op(enum.Enum):
    """The operation with which a reduction combines the tensors of all ranks."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average, Sum, Adasum, Min, Max, Product = Op

_TORCHS = {
    Op.AVERAGE: dist.ReduceOp.SUM,  # gloo has no average: ``start`` divides the sum
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True)
class Reduction:
    """How the tensors of all ranks are combined: operation, factors before and after the operation, compression."""

    op: Op = Op.AVERAGE
    before: float = 1.0
    after: float = 1.0
    compression: type[Compressor] = Compression.none


class Handle:
    """A collective (a call that all ranks make together) that has been started."""

    def __init__(self, work: Any, finish: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self._finish = finish
        self._result: torch.Tensor | None = None

    @classmethod
    def of(cls, result: torch.Tensor) -> Handle:
        """Return a handle for a collective that has already ended."""
        handle = cls(None, lambda: result)
        handle._result = result
        return handle

    def done(self) -> bool:
        """Return whether the result of the collective has arrived."""
        return self._result is not None or bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """Wait for the result of the collective, and return it."""
        if self._result is None:
            self._work.wait()
            self._result = self._finish()
        return self._result


def check_op(op: Any, average: bool | None = None) -> Op:
    """Return the operation that a user asks for with ``op``, or with the older argument ``average``.

    Raises:
        ConfigurationError: the operation is unknown or Adasum, or both arguments are given.

    Example:
        >>> check_op(None, average=False)
        <Op.SUM: 'Sum'>
    """
    if average is not None and op is not None:
        raise ConfigurationError(f"average={average!r} and op={op!r} both choose the operation: pass only op")
    if average is not None:
        return Op.AVERAGE if average else Op.SUM
    if op is Op.ADASUM:
        raise ConfigurationError(
            "op=hvd.Adasum is not supported: use op=hvd.Average, and scale the learning rate by hvd.size()"
        )
    if op is None:
        return Op.AVERAGE
    if not isinstance(op, Op):
        raise ConfigurationError(f"op must be hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product, not {op!r}")
    return op


def no_process_set(process_set: Any) -> None:
    """Check that the user gives no process set (a group of only some ranks), since process sets are not supported.

    Raises:
        ConfigurationError: a process set is given.
    """
    if process_set is not None:
        raise ConfigurationError(
            f"process_set={process_set!r} cannot be used: call torch.distributed's own "
            "functions, with a group from torch.distributed.new_group()"
        )


def start(tensor: torch.Tensor, reduction: Reduction, *, into: torch.Tensor | None = None) -> Handle:
    """Start a reduction over all ranks, and return its handle.

    Args:
        tensor: this rank's tensor.
        reduction: how to combine the tensors of all ranks.
        into: the tensor (possibly ``tensor`` itself) that receives the result; ``None`` for a new tensor.
    """
    wire, dtype = reduction.compression.compress(tensor.detach())
    wire = wire.contiguous()
    if into is None and wire.data_ptr() == tensor.data_ptr():
        wire = wire.clone()
    if reduction.before != 1.0:
        wire.mul_(reduction.before)
    work = dist.all_reduce(wire, _TORCHS[reduction.op], async_op=True)

    def finish() -> torch.Tensor:
        result = reduction.compression.decompress(wire, dtype)
        if reduction.op is Op.AVERAGE:
            result.div_(dist.get_world_size(), rounding_mode=None if result.is_floating_point() else "floor")
        if reduction.after != 1.0:
            result.mul_(reduction.after)
        if into is None:
            return result
        if result.data_ptr() != into.data_ptr():
            into.detach().copy_(result)
        return into

    return Handle(work, finish)


class _Reduced(torch.autograd.Function):
    """A reduction that lets gradients through: the gradient of a sum over ranks is the sum of the ranks' gradients."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        context.reduction = reduction
        return start(tensor, reduction).wait()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return start(gradient, context.reduction).wait(), None


def _reduction(
    average: bool | None, compression: type[Compressor], op: Any, before: float, after: float, process_set: Any
) -> Reduction:
    no_process_set(process_set)
    return Reduction(check_op(op, average), before, after, compression)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Return the average of a tensor over all ranks, or another reduction. Gradients flow through sum and average.

    Args:
        tensor: this rank's tensor, which stays unchanged.
        average: older form of ``op``: ``True`` is :data:`Average`, ``False`` is :data:`Sum`.
        name: accepted without effect.
        compression: how the tensor is compressed for sending.
        op: the operation, by default :data:`Average`. An average of integers is rounded down.
        prescale_factor, postscale_factor: factors by which tensors are multiplied before and after the operation.
        process_set: must be ``None``, since sets of only some ranks are not supported.

    Raises:
        ConfigurationError: an argument is wrong; ``init`` was not called; or the tensor requires gradients, but ``op``
            is neither sum nor average.
    """
    world.require("allreduce")
    reduction = _reduction(average, compression, op, prescale_factor, postscale_factor, process_set)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return start(tensor, reduction).wait()
    if reduction.op not in (Op.AVERAGE, Op.SUM):
        _no_gradient(f"allreduce(op=hvd.{reduction.op.value})", tensor)
    result: torch.Tensor = _Reduced.apply(tensor, reduction)  # type: ignore[no-untyped-call]
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Reduce a tensor in place, and return it. Arguments are as for :func:`allreduce`, but without ``compression``."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Start :func:`allreduce` and return a handle for :func:`synchronize` and :func:`poll`. No gradient flows."""
    world.require("allreduce_async")
    return start(tensor, _reduction(average, Compression.none, op, prescale_factor, postscale_factor, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Start :func:`allreduce_` and return a handle for :func:`synchronize` and :func:`poll`."""
    world.require("allreduce_async_")
    reduction = _reduction(average, Compression.none, op, prescale_factor, postscale_factor, process_set)
    return start(tensor, reduction, into=tensor)


def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Call :func:`allreduce` for each tensor, with all further arguments, and return the results."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Reduce tensors in place, and return them. Arguments and errors are the same as for :func:`allreduce_`."""
    return [allreduce_(tensor, *args, **kwargs) for tensor in tensors]


def poll(handle: Handle) -> bool:
    """Return whether the result of a started collective has arrived."""
    return handle.done()


def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for a started collective, and return its result."""
    return handle.wait()


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Return the tensors of all ranks, joined along the first dimension, whose length may differ from rank to rank.

    Args:
        tensor: this rank's tensor. A tensor without dimensions counts as one with a single element.
        name: accepted without effect.
        process_set: must be ``None``, since sets of only some ranks are not supported.

    Raises:
        ConfigurationError: the tensor requires gradients, which do not flow through this function, or ``init`` was not
            called.
    """
    world.require("allgather")
    no_process_set(process_set)
    _no_gradient("allgather", tensor)
    own = (tensor if tensor.dim() else tensor.reshape(1)).detach().contiguous()
    length = torch.tensor([own.shape[0]], device=own.device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    counts = [int(each) for each in lengths]
    padded = own.new_zeros((max(counts), *own.shape[1:]))
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Do what :func:`allgather` does, and return a handle for :func:`synchronize` and :func:`poll`.

    The call itself waits for all ranks, since it must learn the lengths of their tensors.
    """
    return Handle.of(allgather(tensor, name, process_set))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Return a copy of the tensor of rank ``root_rank``. Arguments are the same as for :func:`broadcast_`.

    Raises:
        ConfigurationError: the tensor requires gradients, which do not flow through this function, or ``init`` was not
            called.
    """
    _no_gradient("broadcast", tensor)
    return broadcast_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Copy the values of one rank's tensor to all ranks, in place, and return the tensor.

    Args:
        tensor: a tensor of the same shape and type on all ranks.
        root_rank: the rank whose values are copied.
        name: accepted without effect.
        process_set: must be ``None``, since sets of only some ranks are not supported.

    Raises:
        ConfigurationError: ``init`` was not called.
    """
    world.require("broadcast")
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start :func:`broadcast` and return a handle for :func:`synchronize` and :func:`poll`. No gradient flows."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start :func:`broadcast_` and return a handle for :func:`synchronize` and :func:`poll`."""
    world.require("broadcast_async")
    no_process_set(process_set)
    wire = tensor.detach().contiguous()
    work = dist.broadcast(wire, root_rank, async_op=True)

    def finish() -> torch.Tensor:
        if wire.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(wire)
        return tensor

    return Handle(work, finish)


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Return the object that rank ``root_rank`` passes. The object must be picklable."""
    world.require("broadcast_object")
    no_process_set(process_set)
    box = [value]
    dist.broadcast_object_list(box, root_rank, device=group.device())
    return box[0]


def allgather_object(value: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Return the objects that all ranks pass, in rank order. The objects must be picklable."""
    world.require("allgather_object")
    no_process_set(process_set)
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, value)
    return boxes


def barrier(process_set: Any = None) -> None:
    """Wait until all ranks have called this function."""
    world.require("barrier")
    no_process_set(process_set)
    allreduce(torch.zeros(1, device=group.device()))


def _no_gradient(name: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ConfigurationError(
            f"gradients do not flow through hvd.{name}: pass tensor.detach(), or use torch.distributed.nn.functional"
        )
