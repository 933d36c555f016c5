"""Differentiable collectives: the gradient of each is a collective, too.

Autograd may compute a gradient in a thread of its own, so each operation remembers its group. All
ranks must run the same collectives in the same order, in backward too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives import Op
from nbelastic.torch.ops.coordination.comparison import begin
from nbelastic.torch.ops.operation import tensor_operations as operations

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.groups import Group
    from nbelastic.torch.ops.operation.reduction import GradientOp
    from nbelastic.torch.ops.operation.tensor_operations import TensorOperation

    Tensors = Sequence[torch.Tensor]
    Collective = Callable[[Tensors], Tensors]


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call `function`, recorded by autograd."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types here


class _Recorded(torch.autograd.Function):
    """A collective, with the collective that computes its tensors' gradients from its outputs'."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[], Tensors], gradient: Collective, *_tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the collective."""
        ctx.gradient = gradient  # it keeps its group: backward may be in a thread without context
        return tuple(run())  # a tuple, because autograd does not look into lists

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of the tensors."""
        return None, None, *ctx.gradient(grads)  # `run` and `gradient` are no tensors


def record(
    group: Group,
    operation: TensorOperation[list[torch.Tensor]],
    name: str | None,
    tensors: Tensors,
    gradient: Collective,
) -> list[torch.Tensor]:
    """Run an operation on tensors, whose gradients are computed by `gradient`."""
    return [*apply(_Recorded, lambda: begin(group, operation, name).wait(), gradient, *tensors)]


def allreduce(
    group: Group,
    tensors: Tensors,
    op: Op | GradientOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str | None = None,
) -> list[torch.Tensor]:
    """Reduce tensors; the gradient is reduced in the same way."""
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    reduction = operations.Allreduce(tensors, outputs, op, prescale, postscale, name)

    def gradient(grads: Tensors) -> Tensors:
        # Refused here only, because forward alone works with every reduction.
        if op not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"the gradient of an allreduce with {op} is not defined; use Average or Sum, or "
                "detach() the tensor"
            )
        return allreduce(group, grads, op, prescale, postscale)

    return record(group, reduction, name, tensors, gradient)


def alltoall(
    group: Group, tensor: torch.Tensor, splits: Sequence[int], name: str | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Exchange rows, whose gradients are exchanged the other way; return how many have come."""
    exchange = operations.Alltoall(tensor, splits, name)

    def gradient(grads: Tensors) -> Tensors:
        return [alltoall(group, grads[0], exchange.received)[0]]  # rows go back to their senders

    (output,) = record(group, exchange, name, [tensor], gradient)
    return output, exchange.received
