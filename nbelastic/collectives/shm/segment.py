"""A shared memory segment in terms of tensors, operations and abort signals."""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from nbelastic.collectives.operations import OperationFailed
from nbelastic.collectives.transport import Op
from nbelastic.errors import CollectiveError, RanksDisagree
from nbelastic.native import core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives.abort_signal import AbortSignal
    from nbelastic.collectives.reduction_tree import Blocks
    from nbelastic.native._core import Group, Tree

TYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in core.TYPES.items()}
OPS = core.OPS
# A sum of booleans is whether any is true, a product whether all are; bytes would overflow.
_OPS_ON_BOOL = {Op.SUM: "max", Op.MIN: "min", Op.MAX: "max", Op.PRODUCT: "min"}


def reduction_codes(dtype: torch.dtype, op: Op) -> tuple[int, int]:
    """Return the native core's codes for a type and a reduction."""
    if dtype is torch.bool:
        return core.TYPES["uint8"], OPS[_OPS_ON_BOOL[op]]
    return TYPES[dtype], OPS[op.value]


def reduction_arguments(
    tensors: Sequence[torch.Tensor], op: Op
) -> tuple[list[tuple[int, int]], int, int]:
    """Return address and length of each of `tensors`, of one type, and the codes for `op`."""
    places = [(each.data_ptr(), each.numel()) for each in tensors]
    return places, *reduction_codes(tensors[0].dtype, op)


def tree_arguments(
    nodes: Sequence[Sequence[torch.Tensor]], outputs: Sequence[torch.Tensor], blocks: Blocks
) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]], Tree, int]:
    """Return the native core's arguments for a sum along a tree."""
    places = [(each.data_ptr(), each.numel()) for each in outputs]
    ours = [
        places if node is outputs else [(each.data_ptr(), each.numel()) for each in node]
        for node in nodes
    ]
    return ours, places, tree_of(blocks), TYPES[outputs[0].dtype]


@functools.lru_cache(maxsize=64)
def tree_of(blocks: Blocks) -> Tree:
    """Return the native core's tree for the blocks of the ranks of a segment."""
    nodes = [len(cover) for cover in blocks.covers]
    return core.Tree(list(blocks.quotas), nodes, list(blocks.order))


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the number of bytes of a tensor."""
    return tensor.data_ptr(), tensor.nbytes


def allocate(group: Group, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a new vector in this rank's part of a segment."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    block: torch.Tensor = from_dlpack(group.empty(count * dtype.itemsize))
    return block.view(dtype)


def concatenate_in(group: Group, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a flat copy of all `tensors` in this rank's part of a segment."""
    counts = [tensor.numel() for tensor in tensors]
    joined = allocate(group, sum(counts), tensors[0].dtype)
    for piece, tensor in zip(torch.split(joined, counts), tensors, strict=True):
        piece.copy_(tensor.detach().view(-1))
    return joined


def abort_with(group: Group, abort_signal: AbortSignal, rank: int) -> None:
    """Break a segment on an abort, unless it is an orderly close."""
    signal = weakref.ref(abort_signal)  # a cycle would keep the segment until it is collected

    def break_segment(reason: str, orderly: bool) -> None:
        given = signal()
        if given is not None and given.kind is RanksDisagree:
            group.abort(reason, differ=True)  # the same error on all ranks
        elif not orderly:
            group.abort(f"rank {rank} has left: {reason}")

    abort_signal.on_abort(break_segment)


def error_type(error: Exception) -> type[CollectiveError]:
    """Return the error to raise for the native core's."""
    return RanksDisagree if isinstance(error, core.Disagreement) else CollectiveError


class SegmentOperation:
    """A collective operation under way in a segment, with its number there."""

    def __init__(self, group: Group, number: int) -> None:
        self._group = group
        self._number = number

    def done(self) -> bool:
        """Return whether it has ended, successfully or not."""
        return self._group.done(self._number)

    def wait(self, abort_signal: AbortSignal) -> bool:
        """Wait for its end or an abort; return whether it has succeeded."""
        try:
            self._group.wait(self._number)
        except core.Broken as error:
            if abort_signal.reason is None:
                failure = OperationFailed(str(error))
                failure.kind = error_type(error)
                raise failure from None
            return False
        return True


class Transfer:
    """A message to send or receive, for an executor, which keeps lent memory alive until then.

    The segment limits its time.
    """

    def __init__(
        self, move: Callable[..., None], arguments: tuple[object, ...], lent: object
    ) -> None:
        self._move = move
        self._arguments = arguments
        self._lent = lent

    def wait(self, _timeout: object) -> None:
        """Move it."""
        try:
            self._move(*self._arguments)
        except core.Broken as error:
            raise RuntimeError(str(error)) from None


def usable_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
