"""Exact sums of sparse gradients, of the rows that micro-batches have used.

A row that a micro-batch has not used is left out of its sums, as a micro-batch without a gradient
is left out of the tree (:mod:`nbelastic.collectives.reduction_tree`). So each row has the bits that
it would have in a dense gradient. Ranks gather the rows of all nodes, and each adds them by itself,
in the order of the tree.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

import torch

from nbelastic.collectives.reduction_tree import IDENTITY, fold
from nbelastic.torch.ops.operation.tensor_operations import Allgather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.ranks.step_share import StepShare


def add_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the sum of two coalesced tensors of one sparse dimension.

    Torch's own addition of sparse tensors starts from zeros, which changes the sign of some.
    """
    n_left = left._nnz()
    rows, places = torch.unique(torch.cat([_rows(left), _rows(right)]), return_inverse=True)
    mine, others = left._values(), right._values()
    values = mine.new_full((len(rows), *mine.shape[1:]), IDENTITY)
    values.index_copy_(0, places[:n_left], mine)
    values.index_add_(0, places[n_left:], others)  # no place twice, so in any order
    return _sparse(rows, values, left.shape)


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor with the rows of a coalesced one, the others absent."""
    dense = torch.full(tensor.shape, IDENTITY, dtype=tensor.dtype, device=tensor.device)
    return dense.index_copy_(0, _rows(tensor), tensor._values())


def sum_rows_over_ranks(
    communicator: Communicator,
    share: StepShare,
    columns: Sequence[Sequence[torch.Tensor | None]],
    like: Sequence[torch.Tensor],
    device_of_wire: torch.device,
) -> list[torch.Tensor]:
    """Return sums of sparse tensors over all micro-batches of a step; all ranks call this.

    For each sum, `columns` has the values of this rank's nodes, and `like` a dense tensor of its
    type, shape and device. The sums are coalesced.
    """
    if communicator.size == 1:
        totals = [_total(share, column) for column in columns]
        return [
            _none(each) if total is None else total
            for total, each in zip(totals, like, strict=True)
        ]
    covers = share.blocks_of(communicator.size).covers if share.exact else None
    nodes = [len(each) for each in covers] if covers else [1] * communicator.size
    counts = _gather_counts(communicator, columns, max(nodes))
    gathered = _gather_rows(communicator, columns, like, counts, device_of_wire)
    found = []
    for number, each in enumerate(like):
        rows, values = gathered[2 * number].to(each.device), gathered[2 * number + 1]
        values = values.to(each.device)
        lengths = [
            length
            for of_rank, n_nodes in zip(counts, nodes, strict=True)
            for length in of_rank[number][:n_nodes]
        ]
        parts = zip(torch.split(rows, lengths), torch.split(values, lengths), strict=True)
        column = [_sparse(r, v, each.shape) if len(r) else None for r, v in parts]
        total = _total(share, column, communicator.size)
        found.append(_none(each) if total is None else total)
    return found


def _total(
    share: StepShare, column: Sequence[torch.Tensor | None], ranks: int = 1
) -> torch.Tensor | None:
    """Add the values of the nodes of all ranks, from left to right."""
    if share.exact:
        (total,) = fold(column, share.blocks_of(ranks).order, _add)
        return total
    return functools.reduce(_add, column, None)


def _add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return add_rows(left, right)


def _gather_counts(
    communicator: Communicator, columns: Sequence[Sequence[torch.Tensor | None]], n_nodes: int
) -> list[list[list[int]]]:
    """Return for each rank, sum and node, how many rows there are; nodes are filled up by zeros."""
    mine = [
        0 if number >= len(column) or column[number] is None else _length(column[number])
        for column in columns
        for number in range(n_nodes)
    ]
    layout = struct.Struct(f"{len(mine)}q")
    found = map(layout.unpack, communicator.allgather_bytes(layout.pack(*mine)))
    starts = range(0, len(mine), n_nodes)
    return [[[*of_rank[start : start + n_nodes]] for start in starts] for of_rank in found]


def _gather_rows(
    communicator: Communicator,
    columns: Sequence[Sequence[torch.Tensor | None]],
    like: Sequence[torch.Tensor],
    counts: Sequence[Sequence[Sequence[int]]],
    device: torch.device,
) -> list[torch.Tensor]:
    """Return for each sum the rows of all ranks' nodes, and their values."""
    parts = []
    for column, each in zip(columns, like, strict=True):
        held = [value for value in column if value is not None] or [_none(each)]
        parts.append(torch.cat([_rows(value) for value in held]).to(device))
        parts.append(torch.cat([value._values() for value in held]).to(device))
    gather = Allgather(parts)
    gather.load_on(communicator.rank, communicator.size)
    numbers = [[n for of_sum in of_rank for n in [sum(of_sum)] * 2] for of_rank in counts]
    for handle in gather.launch(communicator, numbers):
        handle.wait()
    return gather.store()


def _length(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return tensor._nnz()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._indices()[0]


def _none(like: torch.Tensor) -> torch.Tensor:
    rows = torch.empty(0, dtype=torch.int64, device=like.device)
    return _sparse(rows, like.detach().new_empty(0, *like.shape[1:]), like.shape)


def _sparse(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False
    )
