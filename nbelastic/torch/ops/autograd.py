"""Differentiable collectives: the gradient of each is a collective, too.

Autograd may compute a gradient in a thread of its own, so each operation remembers its context. All
ranks must run the same collectives in the same order, in backward too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbelastic.collectives import Op
from nbelastic.torch.ops import collectives as ops

if TYPE_CHECKING:
    from nbelastic.elastic.context import Context
    from nbelastic.torch.ops.adasum import GradientOp

__all__ = ["Allgather", "Allreduce", "Alltoall", "Broadcast", "Reducescatter", "apply"]


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call `function` so that autograd records it."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types here


class Allreduce(torch.autograd.Function):
    """Reduce tensors; the gradient is reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        context: Context,
        op: Op | GradientOp,
        prescale: float,
        postscale: float,
        name: str | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return a reduced tensor for each of `tensors`."""
        ctx.options = (context, op, prescale, postscale, name)
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        pending = ops.allreduce(
            context.communicator(), tensors, outputs, op, prescale, postscale, name
        )
        return tuple(pending.wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Reduce the gradients over all ranks."""
        op = ctx.options[1]
        if op not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"the gradient of an allreduce with {op} is not defined; use Average or Sum, or "
                "detach() the tensor"
            )
        return None, None, None, None, None, *apply(Allreduce, *ctx.options, *grads)


class Allgather(torch.autograd.Function):
    """Concatenate tensors of all ranks; the gradient is the average of this rank's part."""

    @staticmethod
    def forward(ctx: Any, context: Context, name: str | None, tensor: torch.Tensor) -> torch.Tensor:
        """Return the concatenation along the first dimension."""
        communicator = context.communicator()
        pending, lengths = ops.allgather(communicator, tensor, name)
        ctx.context, ctx.shape = context, tensor.shape
        ctx.start, ctx.length = sum(lengths[: communicator.rank]), lengths[communicator.rank]
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Average the gradients over all ranks and take this rank's rows."""
        (reduced,) = apply(Allreduce, ctx.context, Op.AVERAGE, 1.0, 1.0, None, *grads)
        return None, None, reduced.narrow(0, ctx.start, ctx.length).reshape(ctx.shape)


class Broadcast(torch.autograd.Function):
    """Copy a tensor of one rank; the gradient is the average for that rank, zero for others."""

    @staticmethod
    def forward(
        ctx: Any, context: Context, root: int, name: str | None, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Return the root's tensor."""
        ctx.context, ctx.root = context, root
        output = torch.empty_like(tensor)
        ops.broadcast(context.communicator(), [tensor], [output], root, name).wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Average the gradients over all ranks, for the root alone."""
        (reduced,) = apply(Allreduce, ctx.context, Op.AVERAGE, 1.0, 1.0, None, *grads)
        if ctx.context.communicator().rank != ctx.root:
            reduced = reduced * 0
        return None, None, None, reduced


class Alltoall(torch.autograd.Function):
    """Exchange rows; the gradient goes back the way they came."""

    @staticmethod
    def forward(
        ctx: Any, context: Context, name: str | None, tensor: torch.Tensor, *splits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows received, and how many came from each rank (int32)."""
        pending, received = ops.alltoall(context.communicator(), tensor, splits, name)
        ctx.context, ctx.received = context, received
        counts = torch.tensor(received, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return pending.wait(), counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Send each row's gradient to where the row came from."""
        returned, _ = apply(Alltoall, ctx.context, None, grads[0], *ctx.received)
        return None, None, returned, *(None for _ in ctx.received)


class Reducescatter(torch.autograd.Function):
    """Reduce a tensor and keep some rows; the gradient is gathered from all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        context: Context,
        op: Op,
        prescale: float,
        postscale: float,
        name: str | None,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        """Return this rank's rows of the reduced tensor."""
        ctx.context, ctx.op, ctx.factor = context, op, prescale * postscale
        communicator = context.communicator()
        return ops.reducescatter(communicator, tensor, op, prescale, postscale, name).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Gather the gradients of all rows, scaled as the rows were."""
        if ctx.op not in (Op.AVERAGE, Op.SUM):
            raise NotImplementedError(
                f"the gradient of a reducescatter with {ctx.op} is not defined; use Average or Sum"
            )
        communicator = ctx.context.communicator()
        pending, _ = ops.allgather(communicator, grads[0])
        size = communicator.size if ctx.op is Op.AVERAGE else 1
        return None, None, None, None, None, pending.wait() * (ctx.factor / size)
