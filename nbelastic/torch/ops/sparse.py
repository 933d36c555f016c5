"""Sums of sparse tensors: ranks gather indices and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbelastic.collectives import Op
from nbelastic.torch.ops.coordination import begin, group_of
from nbelastic.torch.ops.operation import Allgather, Pending

if TYPE_CHECKING:
    from collections.abc import Sequence


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: object = None,
) -> Pending[torch.Tensor]:
    """Begin to sum or average a sparse tensor over all ranks.

    Parameters
    ----------
    tensor : Tensor
        In torch's layout ``sparse_coo``, of the same size and type on all ranks. Ranks may have
        different indices, and different numbers of them.
    name : str, optional
        Matches the operation with that of other ranks.
    op : default Average
        Average or Sum.
    process_set : ProcessSet, optional
        The ranks that take part; by default all.

    Returns
    -------
    Pending
        Call it, or pass it to ``hvd.synchronize``. The result is sparse and not coalesced.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise ValueError(
            "sparse_allreduce_async takes a sparse_coo tensor; use allreduce for others"
        )
    if op not in (Op.AVERAGE, Op.SUM):
        raise ValueError(f"op must be Average or Sum, not {op!r}")
    group = group_of(process_set)
    gather = Allgather(parts_of(tensor), name)
    gather.text = f"sparse {gather.text}\nof a tensor of size {list(tensor.shape)}, {op.value}"
    pending = begin(group, gather, name)
    divisor = group.size if op is Op.AVERAGE else 1
    return Pending([pending], lambda: sum_of_parts(pending.wait(), tensor.shape, divisor))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return indices and values of a sparse tensor, with equally many rows."""
    return [tensor._indices().transpose(0, 1).contiguous(), tensor._values()]


def sum_of_parts(
    parts: Sequence[torch.Tensor], shape: torch.Size, divisor: int = 1
) -> torch.Tensor:
    """Return the sparse tensor of gathered indices and values."""
    indices, values = parts
    if divisor != 1:
        values = values / divisor
    return torch.sparse_coo_tensor(indices.transpose(0, 1), values, shape, check_invariants=False)
