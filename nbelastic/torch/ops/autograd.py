"""Differentiable collectives: the gradient of each is a collective, too.

Autograd may compute a gradient in a thread of its own, so each operation remembers its group. All
ranks must run the same collectives in the same order, in backward too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives import Op
from nbelastic.torch.ops.coordination.comparison import begin
from nbelastic.torch.ops.operation import tensor_operations as operations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.elastic.ranks.groups import Group
    from nbelastic.torch.ops.operation.adasum import GradientOp

    Tensors = Sequence[torch.Tensor]
    Collective = Callable[[Tensors], Tensors]


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call `function`, recorded by autograd."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types here


class _Recorded(torch.autograd.Function):
    """A collective, with the collective that computes its tensors' gradients from its outputs'."""

    @staticmethod
    def forward(
        ctx: Any, run: Collective, gradient: Collective, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the collective."""
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of the tensors."""
        return None, None, *ctx.gradient(grads)


def _record(tensors: Tensors, run: Collective, gradient: Collective) -> list[torch.Tensor]:
    return [*apply(_Recorded, run, gradient, *tensors)]


def allreduce(
    group: Group,
    tensors: Tensors,
    op: Op | GradientOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
) -> list[torch.Tensor]:
    """Reduce tensors; the gradient is reduced in the same way."""

    def run(given: Tensors) -> Tensors:
        outputs = [torch.empty_like(tensor) for tensor in given]
        reduction = operations.Allreduce(given, outputs, op, prescale, postscale, name)
        return begin(group, reduction, name).wait()

    def gradient(grads: Tensors) -> Tensors:
        if op not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"the gradient of an allreduce with {op} is not defined; use Average or Sum, or "
                "detach() the tensor"
            )
        return allreduce(group, grads, op, prescale, postscale)

    return _record(tensors, run, gradient)


def allgather(group: Group, tensors: Tensors, name: str | None) -> list[torch.Tensor]:
    """Concatenate tensors of all ranks; the gradient is the average of this rank's part."""
    gather, shapes = operations.Allgather(tensors, name), [tensor.shape for tensor in tensors]

    def gradient(grads: Tensors) -> Tensors:
        reduced, rank = allreduce(group, grads, Op.AVERAGE), gather.rank
        return [
            each.narrow(0, sum(lengths[:rank]), lengths[rank]).reshape(shape)
            for each, lengths, shape in zip(reduced, gather.lengths, shapes, strict=True)
        ]

    return _record(tensors, lambda _: begin(group, gather, name).wait(), gradient)


def broadcast(group: Group, tensor: torch.Tensor, root: int, name: str | None) -> torch.Tensor:
    """Copy a tensor of the root; the gradient is the average on the root, zero on other ranks."""
    position = operations.check_root(root, group.ranks)
    is_root = group.rank == position

    def run(given: Tensors) -> Tensors:
        outputs = [torch.empty_like(each) for each in given]
        return begin(group, operations.Broadcast(given, outputs, root, position, name), name).wait()

    def gradient(grads: Tensors) -> Tensors:
        (reduced,) = allreduce(group, grads, Op.AVERAGE)
        return [reduced if is_root else reduced * 0]

    return _record([tensor], run, gradient)[0]


def alltoall(
    group: Group, tensor: torch.Tensor, splits: Sequence[int], name: str | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Exchange rows, whose gradients are exchanged the other way; return how many have come."""
    exchange = operations.Alltoall(tensor, splits, name)

    def gradient(grads: Tensors) -> Tensors:
        return [alltoall(group, grads[0], exchange.received)[0]]

    (output,) = _record([tensor], lambda _: [begin(group, exchange, name).wait()], gradient)
    return output, exchange.received


def reducescatter(
    group: Group,
    tensors: Tensors,
    op: Op,
    prescale: float,
    postscale: float,
    name: str | None,
) -> list[torch.Tensor]:
    """Reduce tensors and keep some rows; the gradient is gathered from all ranks.

    That of a sum is multiplied by the number of ranks, as in Horovod.
    """

    def run(given: Tensors) -> Tensors:
        scatter = operations.Reducescatter(given, op, prescale, postscale, name)
        return begin(group, scatter, name).wait()

    def gradient(grads: Tensors) -> Tensors:
        if op not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"the gradient of a reducescatter with {op} is not defined; use Average or Sum"
            )
        factor = prescale * postscale * (group.size if op is Op.SUM else 1)
        gathered = begin(group, operations.Allgather(grads)).wait()
        return [each * factor for each in gathered]

    return _record(tensors, run, gradient)
