"""Our reductions in Gloo's terms."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp

from nbelastic.collectives.buffers import as_bytes
from nbelastic.collectives.communicator import Op

__all__ = ["as_reducible"]


def as_reducible(buffer: torch.Tensor, op: Op) -> tuple[torch.Tensor, AllreduceOptions]:
    """Return what to hand to an allreduce, and how it is to reduce that.

    An average is a sum that is still to be divided.
    """
    if buffer.dtype is torch.bool:
        return as_bytes(buffer), _OPTIONS_FOR_TRUTHS[op]
    return buffer, _OPTIONS[op]


def _options(op: ReduceOp.RedOpType) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(op)
    return options


_OPTIONS = {
    Op.SUM: _options(ReduceOp.SUM),
    Op.AVERAGE: _options(ReduceOp.SUM),
    Op.MIN: _options(ReduceOp.MIN),
    Op.MAX: _options(ReduceOp.MAX),
    Op.PRODUCT: _options(ReduceOp.PRODUCT),
}
# A sum of truths is whether any is true, and a product whether all are; bytes would overflow.
_OPTIONS_FOR_TRUTHS = {
    Op.SUM: _OPTIONS[Op.MAX],
    Op.MIN: _OPTIONS[Op.MIN],
    Op.MAX: _OPTIONS[Op.MAX],
    Op.PRODUCT: _OPTIONS[Op.MIN],
}
