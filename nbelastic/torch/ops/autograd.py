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
    from nbelastic.elastic.ranks.groups import Group
    from nbelastic.torch.ops.operation.adasum import GradientOp


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call `function` so that autograd records it."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types here


class AllreduceFunction(torch.autograd.Function):
    """Reduce tensors; the gradient is reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        op: Op | GradientOp,
        prescale: float,
        postscale: float,
        name: str | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return a reduced tensor for each of `tensors`."""
        ctx.options = (group, op, prescale, postscale)
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        reduction = operations.Allreduce(tensors, outputs, op, prescale, postscale, name)
        return tuple(begin(group, reduction, name).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Reduce the gradients over the ranks."""
        op = ctx.options[1]
        if op not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"the gradient of an allreduce with {op} is not defined; use Average or Sum, or "
                "detach() the tensor"
            )
        return None, None, None, None, None, *apply(AllreduceFunction, *ctx.options, None, *grads)


class AllgatherFunction(torch.autograd.Function):
    """Concatenate tensors of all ranks; the gradient is the average of this rank's part."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, name: str | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the concatenations along the first dimension."""
        gather = operations.Allgather(tensors, name)
        gathered = begin(group, gather, name).wait()
        position = group.ranks.index(group.context.rank)
        ctx.group = group
        ctx.parts = [
            (sum(lengths[:position]), lengths[position], tensor.shape)
            for lengths, tensor in zip(gather.lengths, tensors, strict=True)
        ]
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Average the gradients over the ranks and take this rank's rows."""
        reduced = apply(AllreduceFunction, ctx.group, Op.AVERAGE, 1.0, 1.0, None, *grads)
        own = [
            each.narrow(0, start, length).reshape(shape)
            for each, (start, length, shape) in zip(reduced, ctx.parts, strict=True)
        ]
        return None, None, *own


class BroadcastFunction(torch.autograd.Function):
    """Copy a tensor of one rank; the gradient is the average for that rank, zero for others."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, root: int, name: str | None, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Return the root's tensor."""
        position = operations.check_root(root, group.ranks)
        ctx.group, ctx.is_root = group, group.context.rank == group.ranks[position]
        output = torch.empty_like(tensor)
        copies = operations.Broadcast([tensor], [output], root, position, name)
        begin(group, copies, name).wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Average the gradients over the ranks, for the root alone."""
        (reduced,) = apply(AllreduceFunction, ctx.group, Op.AVERAGE, 1.0, 1.0, None, *grads)
        return None, None, None, reduced if ctx.is_root else reduced * 0


class AlltoallFunction(torch.autograd.Function):
    """AlltoallInto rows; their gradients are exchanged the other way."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, name: str | None, tensor: torch.Tensor, *splits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows received, and how many each rank has sent (int32)."""
        exchange = operations.Alltoall(tensor, splits, name)
        output = begin(group, exchange, name).wait()
        ctx.group, ctx.received = group, exchange.received
        counts = torch.tensor(exchange.received, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return output, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Send each row's gradient to the rank that sent the row."""
        returned, _ = apply(AlltoallFunction, ctx.group, None, grads[0], *ctx.received)
        return None, None, returned, *(None for _ in ctx.received)


class ReducescatterFunction(torch.autograd.Function):
    """Reduce tensors and keep some rows; the gradient is gathered from all ranks.

    That of a sum is multiplied by the number of ranks, as in Horovod.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        op: Op,
        prescale: float,
        postscale: float,
        name: str | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return this rank's rows of the reduced tensors."""
        ctx.group, ctx.op, ctx.factor = group, op, prescale * postscale
        scatter = operations.Reducescatter(tensors, op, prescale, postscale, name)
        return tuple(begin(group, scatter, name).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Gather the gradients of all rows, scaled as the rows were."""
        if ctx.op not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"the gradient of a reducescatter with {ctx.op} is not defined; use Average or Sum"
            )
        factor = ctx.factor * (ctx.group.size if ctx.op is Op.SUM else 1)
        gathered = begin(ctx.group, operations.Allgather(grads)).wait()
        return None, None, None, None, None, *(each * factor for each in gathered)
