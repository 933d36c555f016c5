"""Reduction of gradients that are given as tensors, all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.elastic.ranks.context import current
from nbelastic.torch.ops.coordination import group_of
from nbelastic.torch.ops.reductions import Average, Sum, grouped_allreduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.keras.options import KerasOptions


def reduce(gradients: Sequence[torch.Tensor], options: KerasOptions) -> list[torch.Tensor]:
    """Return gradients reduced over all ranks, which call this together.

    One more number travels with them: whether a rank knows that the membership is about to change.
    """
    context = current()
    context.communicator()  # in a job without an elastic loop, the first one makes it a member
    group = group_of(options.process_set)
    if context.rank not in group.ranks:
        return list(gradients)
    op, pre = options.op, options.predivide
    before, after = 1.0, 1.0
    if op is Average and pre != 1.0:
        op, before, after = Sum, 1.0 / pre, pre / group.size
    flags = (
        [torch.tensor([float(context.change_flag())])]
        if isinstance(op, Op) and group.is_global
        else []
    )
    reduced = grouped_allreduce(
        [*gradients, *flags],
        compression=options.compression,
        op=op,
        prescale_factor=before,
        postscale_factor=after,
        process_set=options.process_set,
    )
    if flags:
        context.agree(bool(reduced.pop()))
    return reduced
